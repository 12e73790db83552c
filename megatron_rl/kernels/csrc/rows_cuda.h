// Launchers of the CUDA row kernels, without torch; they return a cudaError_t as int (0: success).
#pragma once
#include "row_math.h"

namespace mrl {

int cuda_row_stats(const Rows& a, float* out, int64_t count, void* stream);
int cuda_row_grads(const Rows& a, const float* top, const float* mass, const float* coefficient,
                   bool bf16, int64_t count, void* stream);
int cuda_cispo_rows(const Rows& a, const CispoArgs& c, bool bf16, float* out, int64_t count,
                    void* stream);
int cuda_merge_rows(const float* stats, int64_t shards, int64_t count, float scale, float* out,
                    void* stream);
int cuda_cispo_terms(const float* logp, const CispoArgs& c, int64_t count, float* out,
                     void* stream);
const char* cuda_error_text(int error);

}  // namespace mrl
