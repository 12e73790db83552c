// Arithmetic of one row of logits, shared by g++ (CPU) and nvcc (GPU). No torch.
//
//   z_v = scale * x_v                            scale = 1 / temperature, > 0
//   top = max x_v,  mass = sum e^(z_v - z_top),  moment = sum (z_v - z_top) e^(z_v - z_top)
//   log p_y = scale (x_y - top) - log mass       entropy = log mass - moment / mass
//   c = -w A min(e^(log p_y - g), cap)           CISPO; loss term = c log p_y, c detached
//   d loss / d x_v = c scale (1[v = y] - p_v)
//
// All of it is fp32 and relative to the largest logit: an offset of a row costs no accuracy.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define MRL_FN __host__ __device__ __forceinline__
#else
#define MRL_FN inline __attribute__((always_inline))
#endif

namespace mrl {

// The largest logit of an empty part: finite, so that merging two empty parts gives 0 and not NaN.
constexpr float kNoTop = -3.0e38f;
// Below this, e^d is denormal and is set to 0.
constexpr float kLeast = -87.3f;

// e^d for d <= 0 to about 1 ulp; 0 for d < kLeast and for -inf; NaN for NaN. Branch-free on CPU, so
// that g++ vectorizes loops of it without -ffast-math.
MRL_FN float exp_nonpositive(float d) {
#if defined(__CUDA_ARCH__)
  return __expf(d);
#else
  const float x = d < kLeast ? kLeast : d;
  const float magic = 12582912.0f;  // 1.5 * 2^23: the sum's low bits hold the nearest integer
  float n = x * 1.44269504088896341f + magic;
  int32_t bits;
  std::memcpy(&bits, &n, 4);
  n -= magic;
  const float r = (x - n * 0.693145751953125f) - n * 1.42860677e-6f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  bits = static_cast<int32_t>(static_cast<uint32_t>(bits + 127) << 23);
  float power;
  std::memcpy(&power, &bits, 4);
  return d < kLeast ? 0.0f : p * power;
#endif
}

// d e^d, with 0 for d = -inf (a masked logit).
MRL_FN float moment_term(float d, float e) { return (d < kLeast ? kLeast : d) * e; }

struct Stat {
  float top, mass, moment;
};

MRL_FN Stat stat_empty() { return {kNoTop, 0.0f, 0.0f}; }

// Statistics of two disjoint parts of a row (lanes, warps, vocabulary shards).
MRL_FN Stat merge(Stat a, Stat b, float scale) {
  const float top = a.top > b.top ? a.top : b.top;
  const float da = (a.top - top) * scale, db = (b.top - top) * scale;
  const float ea = exp_nonpositive(da), eb = exp_nonpositive(db);
  // An empty part has mass 0 and a distance that may be -inf: its moment is 0.
  const float ma = a.mass == 0.0f ? 0.0f : ea * (a.moment + da * a.mass);
  const float mb = b.mass == 0.0f ? 0.0f : eb * (b.moment + db * b.mass);
  return {top, a.mass * ea + b.mass * eb, ma + mb};
}

// Not x_target - (top + log mass): at an offset of 1e4 that would cost 3 digits.
MRL_FN float log_prob(Stat s, float x_target, float scale) {
  return (x_target - s.top) * scale - logf(s.mass);
}

MRL_FN float entropy(Stat s) {
  const float h = logf(s.mass) - s.moment / s.mass;
  return h < 0.0f ? 0.0f : h;  // rounding only; NaN stays NaN
}

struct Term {
  float ratio, coefficient, loss;
};

// A row of weight 0 has coefficient 0, also where its other numbers are NaN.
MRL_FN Term cispo(float logp, float generator_logp, float advantage, float weight, float cap) {
  const float ratio = expf(logp - generator_logp);
  const float held = ratio > cap ? cap : ratio;  // NaN stays NaN
  const float c = weight == 0.0f ? 0.0f : -weight * advantage * held;
  return {ratio, c, c == 0.0f ? 0.0f : c * logp};
}

MRL_FN uint32_t bf16_bits(float f) {  // rounds to nearest even; not for NaN
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}

MRL_FN uint16_t to_bf16(float f) {
  return f != f ? static_cast<uint16_t>(0x7fc0) : static_cast<uint16_t>(bf16_bits(f));
}

// Logits of one tensor-parallel shard: x[row * stride + column], column < width. Columns from
// `columns` on are padding without probability. `first` is the shard's first token id.
struct Rows {
  float* x;
  int64_t stride, width;
  const int64_t* target;
  int64_t first, columns;
  float scale;
};

struct CispoArgs {
  const float *generator_logp, *advantage, *weight;
  float cap;
};

}  // namespace mrl
