// Checked access to the operators' tensors.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "row_math.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

inline const float* floats(const Tensor& t, int64_t count, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.dim() == 1 && t.size(0) == count &&
                      t.is_contiguous(),
                  name, ": expected contiguous fp32 [", count, "]");
  return static_cast<const float*>(t.const_data_ptr());
}

inline mrl::Rows rows_of(const Tensor& x, void* data, const Tensor& targets, int64_t first,
                  int64_t columns, double scale) {
  STD_TORCH_CHECK(x.dim() == 2 && x.scalar_type() == ScalarType::Float &&
                      (x.size(1) <= 1 || x.stride(1) == 1),
                  "logits: expected fp32 [rows, vocabulary] with unit column stride");
  STD_TORCH_CHECK(targets.dim() == 1 && targets.size(0) == x.size(0) && targets.is_contiguous() &&
                      targets.scalar_type() == ScalarType::Long,
                  "targets: expected contiguous int64 [rows]");
  STD_TORCH_CHECK(columns >= 0 && columns <= x.size(1), "columns: expected 0 to ", x.size(1),
                  ", got ", columns);
  STD_TORCH_CHECK(scale > 0, "scale: expected a positive number, got ", scale);
  return {static_cast<float*>(data),
          x.stride(0),
          x.size(1),
          static_cast<const int64_t*>(targets.const_data_ptr()),
          first,
          columns,
          static_cast<float>(scale)};
}

inline mrl::CispoArgs cispo_args(const Tensor& generator_logprobs, const Tensor& advantages,
                          const Tensor& weights, double max_ratio, int64_t count) {
  return {floats(generator_logprobs, count, "generator_logprobs"),
          floats(advantages, count, "advantages"), floats(weights, count, "weights"),
          static_cast<float>(max_ratio)};
}

inline Tensor floats_like(const Tensor& like, int64_t a, int64_t b) {
  return torch::stable::new_empty(like, {a, b});
}

inline float* data(Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

struct Stats {  // checked [shards, 4, rows]
  const float* p;
  int64_t shards, count;
};

inline Stats stats_of(const Tensor& stats) {
  STD_TORCH_CHECK(stats.dim() == 3 && stats.size(1) == 4 && stats.is_contiguous() &&
                      stats.scalar_type() == ScalarType::Float,
                  "stats: expected contiguous fp32 [shards, 4, rows]");
  return {static_cast<const float*>(stats.const_data_ptr()), stats.size(0), stats.size(2)};
}

}  // namespace
