// Registration under torch's stable ABI: one file for every supported torch, with or without GPU.
// ../cispo_reference.py documents the operators, ../library.py registers the fakes.
#include <cstdlib>
#include <memory>

#include "gemm_bf16.h"
#include "library_args.h"
#include "rows_cpu.h"

namespace {

// ---- CPU --------------------------------------------------------------------------------------

Tensor row_stats_cpu(const Tensor& x, const Tensor& targets, int64_t first, int64_t columns,
                     double scale) {
  const auto a = rows_of(x, const_cast<void*>(x.const_data_ptr()), targets, first, columns, scale);
  const int64_t count = x.size(0);
  Tensor out = floats_like(x, 4, count);
  float* o = data(out);
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    mrl::cpu_row_stats(a, o, count, begin, end);
  });
  return out;
}

void row_grads_cpu(Tensor x, const Tensor& targets, int64_t first, int64_t columns, double scale,
                   const Tensor& top, const Tensor& mass, const Tensor& coefficients, bool bf16) {
  const int64_t count = x.size(0);
  const auto a = rows_of(x, x.mutable_data_ptr(), targets, first, columns, scale);
  const float *t = floats(top, count, "top"), *m = floats(mass, count, "mass");
  const float* c = floats(coefficients, count, "coefficients");
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    mrl::cpu_row_grads(a, t, m, c, bf16, begin, end);
  });
}

Tensor cispo_rows_cpu(Tensor x, const Tensor& targets, int64_t first, int64_t columns, double scale,
                      const Tensor& generator_logprobs, const Tensor& advantages,
                      const Tensor& weights, double max_ratio, bool bf16) {
  const int64_t count = x.size(0);
  const auto a = rows_of(x, x.mutable_data_ptr(), targets, first, columns, scale);
  const auto c = cispo_args(generator_logprobs, advantages, weights, max_ratio, count);
  Tensor out = floats_like(x, 5, count);
  float* o = data(out);
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    mrl::cpu_cispo_rows(a, c, bf16, o, count, begin, end);
  });
  return out;
}

Tensor merge_rows_cpu(const Tensor& stats, double scale) {
  const Stats s = stats_of(stats);
  Tensor out = floats_like(stats, 4, s.count);
  mrl::cpu_merge_rows(s.p, s.shards, s.count, static_cast<float>(scale), data(out));
  return out;
}

Tensor cispo_terms_cpu(const Tensor& logprobs, const Tensor& generator_logprobs,
                       const Tensor& advantages, const Tensor& weights, double max_ratio) {
  const int64_t count = logprobs.size(0);
  const auto c = cispo_args(generator_logprobs, advantages, weights, max_ratio, count);
  Tensor out = floats_like(logprobs, 3, count);
  mrl::cpu_cispo_terms(floats(logprobs, count, "logprobs"), c, count, data(out));
  return out;
}

#if defined(MRL_X86_GEMM)
struct Matrix {
  uint16_t* p;
  int64_t rows, columns, stride;
};

Matrix bf16_matrix(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 2 && t.scalar_type() == ScalarType::BFloat16 &&
                      (t.size(1) <= 1 || t.stride(1) == 1),
                  name, ": expected a bf16 matrix with unit column stride");
  return {static_cast<uint16_t*>(const_cast<void*>(t.const_data_ptr())), t.size(0), t.size(1),
          t.stride(0)};
}

float* fp32_matrix(Tensor& t, int64_t rows, int64_t columns, const char* name) {
  STD_TORCH_CHECK(t.dim() == 2 && t.scalar_type() == ScalarType::Float && t.size(0) == rows &&
                      t.size(1) == columns && (columns <= 1 || t.stride(1) == 1),
                  name, ": expected fp32 [", rows, ", ", columns, "] with unit column stride");
  return data(t);
}

int checked(int64_t kind) {
  STD_TORCH_CHECK(kind != mrl::kGemmNone && mrl::gemm_can_run(static_cast<int>(kind)),
                  "this processor cannot run bf16 GEMM kind ", kind);
  return static_cast<int>(kind);
}

void bf16_logits(const Tensor& hidden, const Tensor& weight, Tensor out, int64_t kind) {
  const int k = checked(kind);
  const Matrix h = bf16_matrix(hidden, "hidden"), w = bf16_matrix(weight, "weight");
  STD_TORCH_CHECK(h.columns == w.columns, "hidden and weight differ in width");
  float* o = fp32_matrix(out, h.rows, w.rows, "out");
  torch::stable::parallel_for(0, mrl::panels(w.rows), 16, [&](int64_t begin, int64_t end) {
    mrl::gemm_logits(k, h.p, h.stride, w.p, w.stride, o, out.stride(0), h.rows, h.columns, w.rows,
                     begin, end);
  });
}

void bf16_hidden_grad(const Tensor& grads, const Tensor& weight, Tensor out, int64_t kind) {
  const int k = checked(kind);
  const Matrix d = bf16_matrix(grads, "grads"), w = bf16_matrix(weight, "weight");
  STD_TORCH_CHECK(d.columns == w.rows, "grads and weight differ in vocabulary");
  float* o = fp32_matrix(out, d.rows, w.columns, "out");
  torch::stable::parallel_for(0, mrl::panels(w.columns), 1, [&](int64_t begin, int64_t end) {
    mrl::gemm_hidden_grad(k, d.p, d.stride, w.p, w.stride, o, out.stride(0), d.rows, w.columns,
                          d.columns, begin, end);
  });
}

void bf16_weight_grad(const Tensor& grads, const Tensor& hidden, Tensor out, bool accumulate,
                      int64_t kind) {
  const int k = checked(kind);
  const Matrix d = bf16_matrix(grads, "grads"), h = bf16_matrix(hidden, "hidden");
  STD_TORCH_CHECK(d.rows == h.rows, "grads and hidden differ in rows");
  float* o = fp32_matrix(out, d.columns, h.columns, "out");
  const int64_t words = mrl::gemm_packed_words(h.rows, h.columns);
  const std::unique_ptr<uint32_t, decltype(&std::free)> packed(
      static_cast<uint32_t*>(std::aligned_alloc(64, static_cast<size_t>(words * 4 + 64) & ~63ull)),
      &std::free);
  STD_TORCH_CHECK(packed != nullptr, "out of memory");
  mrl::gemm_pack_hidden(h.p, h.stride, h.rows, h.columns, packed.get());
  torch::stable::parallel_for(0, mrl::panels(d.columns), 4, [&](int64_t begin, int64_t end) {
    mrl::gemm_weight_grad(k, d.p, d.stride, packed.get(), o, out.stride(0), h.rows, h.columns,
                          d.columns, accumulate, begin, end);
  });
}
#endif

}  // namespace

// Called through ctypes before the operators are chosen.
extern "C" __attribute__((visibility("default"))) int megatron_rl_best_gemm() {
  return mrl::gemm_best_kind();
}
extern "C" __attribute__((visibility("default"))) int megatron_rl_can_run_gemm(int kind) {
  return mrl::gemm_can_run(kind);
}
extern "C" __attribute__((visibility("default"))) int megatron_rl_has_cuda() {
#if defined(MRL_CUDA)
  return 1;
#else
  return 0;
#endif
}

STABLE_TORCH_LIBRARY(megatron_rl, m) {
  m.def(
      "row_stats(Tensor logits, Tensor targets, int first, int columns, float scale) -> Tensor");
  m.def(
      "row_grads_(Tensor(a!) logits, Tensor targets, int first, int columns, float scale, "
      "Tensor top, Tensor mass, Tensor coefficients, bool bf16) -> ()");
  m.def(
      "cispo_rows_(Tensor(a!) logits, Tensor targets, int first, int columns, float scale, "
      "Tensor generator_logprobs, Tensor advantages, Tensor weights, float max_ratio, bool bf16) "
      "-> Tensor");
  m.def("merge_rows(Tensor stats, float scale) -> Tensor");
  m.def(
      "cispo_terms(Tensor logprobs, Tensor generator_logprobs, Tensor advantages, Tensor weights, "
      "float max_ratio) -> Tensor");
  m.def("bf16_logits_(Tensor hidden, Tensor weight, Tensor(a!) out, int kind) -> ()");
  m.def("bf16_hidden_grad_(Tensor grads, Tensor weight, Tensor(a!) out, int kind) -> ()");
  m.def(
      "bf16_weight_grad_(Tensor grads, Tensor hidden, Tensor(a!) out, bool accumulate, int kind) "
      "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_rl, CPU, m) {
  m.impl("row_stats", TORCH_BOX(&row_stats_cpu));
  m.impl("row_grads_", TORCH_BOX(&row_grads_cpu));
  m.impl("cispo_rows_", TORCH_BOX(&cispo_rows_cpu));
  m.impl("merge_rows", TORCH_BOX(&merge_rows_cpu));
  m.impl("cispo_terms", TORCH_BOX(&cispo_terms_cpu));
#if defined(MRL_X86_GEMM)
  m.impl("bf16_logits_", TORCH_BOX(&bf16_logits));
  m.impl("bf16_hidden_grad_", TORCH_BOX(&bf16_hidden_grad));
  m.impl("bf16_weight_grad_", TORCH_BOX(&bf16_weight_grad));
#endif
}
