// Row kernels on CPU, without torch; the caller distributes rows [begin, end) over threads.
// Outputs are [k, count] row-major: out[i * count + row].
#pragma once
#include "row_math.h"

namespace mrl {

void cpu_row_stats(const Rows& a, float* out, int64_t count, int64_t begin, int64_t end);
void cpu_row_grads(const Rows& a, const float* top, const float* mass, const float* coefficient,
                   bool bf16, int64_t begin, int64_t end);
void cpu_cispo_rows(const Rows& a, const CispoArgs& c, bool bf16, float* out, int64_t count,
                    int64_t begin, int64_t end);
void cpu_merge_rows(const float* stats, int64_t shards, int64_t count, float scale, float* out);
void cpu_cispo_terms(const float* logp, const CispoArgs& c, int64_t count, float* out);

}  // namespace mrl
