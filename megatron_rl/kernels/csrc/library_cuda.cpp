// The CUDA half of the operators; in the library only if nvcc compiled rows_cuda.cu.
#include <torch/csrc/stable/accelerator.h>

#include "library_args.h"
#include "rows_cuda.h"

// Exported by libtorch_cuda only: null in a torch without CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

namespace {

void* stream_of(const Tensor& t) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return stream;
}

void launched(int error, const char* name) {
  STD_TORCH_CHECK(error == 0, name, ": ", mrl::cuda_error_text(error));
}

using Guard = torch::stable::accelerator::DeviceGuard;

Tensor row_stats_cuda(const Tensor& x, const Tensor& targets, int64_t first, int64_t columns,
                      double scale) {
  const Guard guard(x.get_device_index());
  const auto a = rows_of(x, const_cast<void*>(x.const_data_ptr()), targets, first, columns, scale);
  Tensor out = floats_like(x, 4, x.size(0));
  if (x.size(0) == 0) return out;
  launched(mrl::cuda_row_stats(a, data(out), x.size(0), stream_of(x)), "row_stats");
  return out;
}

void row_grads_cuda(Tensor x, const Tensor& targets, int64_t first, int64_t columns, double scale,
                    const Tensor& top, const Tensor& mass, const Tensor& coefficients, bool bf16) {
  const Guard guard(x.get_device_index());
  const int64_t count = x.size(0);
  const auto a = rows_of(x, x.mutable_data_ptr(), targets, first, columns, scale);
  const float *t = floats(top, count, "top"), *m = floats(mass, count, "mass");
  const float* c = floats(coefficients, count, "coefficients");
  if (count == 0) return;
  launched(mrl::cuda_row_grads(a, t, m, c, bf16, count, stream_of(x)), "row_grads_");
}

Tensor cispo_rows_cuda(Tensor x, const Tensor& targets, int64_t first, int64_t columns,
                       double scale, const Tensor& generator_logprobs, const Tensor& advantages,
                       const Tensor& weights, double max_ratio, bool bf16) {
  const Guard guard(x.get_device_index());
  const int64_t count = x.size(0);
  const auto a = rows_of(x, x.mutable_data_ptr(), targets, first, columns, scale);
  const auto c = cispo_args(generator_logprobs, advantages, weights, max_ratio, count);
  Tensor out = floats_like(x, 5, count);
  if (count == 0) return out;
  launched(mrl::cuda_cispo_rows(a, c, bf16, data(out), count, stream_of(x)), "cispo_rows_");
  return out;
}

Tensor merge_rows_cuda(const Tensor& stats, double scale) {
  const Guard guard(stats.get_device_index());
  const Stats s = stats_of(stats);
  Tensor out = floats_like(stats, 4, s.count);
  if (s.count == 0) return out;
  launched(mrl::cuda_merge_rows(s.p, s.shards, s.count, static_cast<float>(scale), data(out),
                                stream_of(stats)),
           "merge_rows");
  return out;
}

Tensor cispo_terms_cuda(const Tensor& logprobs, const Tensor& generator_logprobs,
                        const Tensor& advantages, const Tensor& weights, double max_ratio) {
  const Guard guard(logprobs.get_device_index());
  const int64_t count = logprobs.size(0);
  const auto c = cispo_args(generator_logprobs, advantages, weights, max_ratio, count);
  Tensor out = floats_like(logprobs, 3, count);
  if (count == 0) return out;
  launched(mrl::cuda_cispo_terms(floats(logprobs, count, "logprobs"), c, count, data(out),
                                 stream_of(logprobs)),
           "cispo_terms");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megatron_rl, CUDA, m) {
  m.impl("row_stats", TORCH_BOX(&row_stats_cuda));
  m.impl("row_grads_", TORCH_BOX(&row_grads_cuda));
  m.impl("cispo_rows_", TORCH_BOX(&cispo_rows_cuda));
  m.impl("merge_rows", TORCH_BOX(&merge_rows_cuda));
  m.impl("cispo_terms", TORCH_BOX(&cispo_terms_cuda));
}
