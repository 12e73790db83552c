// The CUDA launchers, emulated, under C names for ctypes.
#define MRL_EMULATE_CUDA
#include "rows_cuda.cu"

extern "C" {

void emulate_order(int order) { mrl_emulation_order = order; }

void emulate_row_stats(float* x, int64_t stride, int64_t width, const int64_t* target,
                       int64_t first, int64_t columns, float scale, int64_t count, float* out) {
  mrl::cuda_row_stats({x, stride, width, target, first, columns, scale}, out, count, nullptr);
}

void emulate_row_grads(float* x, int64_t stride, int64_t width, const int64_t* target,
                       int64_t first, int64_t columns, float scale, int64_t count,
                       const float* top, const float* mass, const float* coefficient, int bf16) {
  mrl::cuda_row_grads({x, stride, width, target, first, columns, scale}, top, mass, coefficient,
                      bf16 != 0, count, nullptr);
}

void emulate_cispo_rows(float* x, int64_t stride, int64_t width, const int64_t* target,
                        int64_t first, int64_t columns, float scale, int64_t count,
                        const float* generator, const float* advantage, const float* weight,
                        float cap, int bf16, float* out) {
  mrl::cuda_cispo_rows({x, stride, width, target, first, columns, scale},
                       {generator, advantage, weight, cap}, bf16 != 0, out, count, nullptr);
}

void emulate_merge_rows(const float* stats, int64_t shards, int64_t count, float scale,
                        float* out) {
  mrl::cuda_merge_rows(stats, shards, count, scale, out, nullptr);
}

void emulate_cispo_terms(const float* logp, const float* generator, const float* advantage,
                         const float* weight, float cap, int64_t count, float* out) {
  mrl::cuda_cispo_terms(logp, {generator, advantage, weight, cap}, count, out, nullptr);
}
}
