// Row kernels on CPU. A row is read from memory once, block by block: the largest logit, the sums,
// and e^(z - z_block) in the logits' place. The gradient then scales the blocks in the L2 cache.
// Every sum has a fixed order.
#include "rows_cpu.h"

#include <memory>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MRL_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MRL_CLONES
#endif

namespace mrl {
namespace {

constexpr int kLanes = 64;
// A block (16 KiB of logits) fits in L1. Sums over blocks are doubles, so that the error does not
// grow with the vocabulary.
constexpr int64_t kBlock = 64 * kLanes;

MRL_CLONES float largest(const float* x, int64_t n) {
  float lane[kLanes];
  for (int j = 0; j < kLanes; ++j) lane[j] = kNoTop;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
  float top = kNoTop;
  for (int j = 0; j < kLanes; ++j) top = lane[j] > top ? lane[j] : top;
  for (; i < n; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

template <bool kStore>
MRL_FN Stat sums(float* x, int64_t n, float top, float scale) {
  float s[kLanes], m[kLanes];
  for (int j = 0; j < kLanes; ++j) s[j] = m[j] = 0.0f;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    // Fetch the next block from memory during this one.
    for (int j = 0; j < kLanes; j += 16) __builtin_prefetch(x + i + j + kBlock, kStore, 2);
    for (int j = 0; j < kLanes; ++j) {
      const float d = (x[i + j] - top) * scale, e = exp_nonpositive(d);
      s[j] += e;
      m[j] += moment_term(d, e);
      if (kStore) x[i + j] = e;
    }
  }
  double mass = 0.0, moment = 0.0;
  for (int j = 0; j < kLanes; ++j) mass += s[j], moment += m[j];
  for (; i < n; ++i) {
    const float d = (x[i] - top) * scale, e = exp_nonpositive(d);
    mass += e;
    moment += moment_term(d, e);
    if (kStore) x[i] = e;
  }
  return {top, static_cast<float>(mass), static_cast<float>(moment)};
}

MRL_CLONES Stat sums_of_logits(const float* x, int64_t n, float top, float scale) {
  return sums<false>(const_cast<float*>(x), n, top, scale);
}
MRL_CLONES Stat sums_leaving_exponentials(float* x, int64_t n, float top, float scale) {
  return sums<true>(x, n, top, scale);
}

MRL_CLONES void exponentials(float* x, int64_t n, float top, float scale) {
  for (int64_t i = 0; i < n; ++i) x[i] = exp_nonpositive((x[i] - top) * scale);
}

// Returns the statistics of a row. With `tops`, logits are replaced by exponentials relative to the
// largest logit of their block, tops[b].
Stat statistics(float* x, int64_t n, float scale, float* tops) {
  float top = kNoTop;
  double mass = 0.0, moment = 0.0;
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t length = i + kBlock < n ? kBlock : n - i;
    const float block_top = largest(x + i, length);
    const Stat s = tops ? sums_leaving_exponentials(x + i, length, block_top, scale)
                        : sums_of_logits(x + i, length, block_top, scale);
    if (tops) tops[i / kBlock] = block_top;
    const float new_top = block_top > top ? block_top : top;
    // Same as `merge`, in doubles.
    const float da = (top - new_top) * scale, db = (block_top - new_top) * scale;
    const double ea = exp_nonpositive(da), eb = exp_nonpositive(db);
    moment = (mass == 0.0 ? 0.0 : ea * (moment + da * mass)) +
             (s.mass == 0.0f ? 0.0 : eb * (s.moment + static_cast<double>(db) * s.mass));
    mass = mass * ea + s.mass * eb;
    top = new_top;
  }
  return {top, static_cast<float>(mass), static_cast<float>(moment)};
}

MRL_CLONES void times(float* x, int64_t n, float k) {
  for (int64_t i = 0; i < n; ++i) x[i] *= k;
}

// Writes bf16(k * x[i]) to `out`, which may be the front of the row that holds x: results never
// overtake x.
MRL_CLONES void times_bf16(const float* x, int64_t n, float k, char* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    uint32_t wide[kLanes];
    for (int j = 0; j < kLanes; ++j) {
      const float f = k * x[i + j];
      wide[j] = f != f ? 0x7fc0u : bf16_bits(f);
    }
    uint16_t narrow[kLanes];
    for (int j = 0; j < kLanes; ++j) narrow[j] = static_cast<uint16_t>(wide[j]);
    std::memcpy(out + 2 * i, narrow, sizeof narrow);
  }
  for (; i < n; ++i) {
    const uint16_t h = to_bf16(k * x[i]);
    std::memcpy(out + 2 * i, &h, 2);
  }
}

// Turns a row of exponentials into the gradient; `column` is the target's, or -1. Exponentials are
// relative to the row's largest logit, or with `tops` to each block's.
void finish(float* x, int64_t width, int64_t columns, int64_t column, float c, float scale, Stat s,
            const float* tops, bool bf16) {
  char* bytes = reinterpret_cast<char*>(x);
  if (c == 0.0f) {  // exact zeros, also where the logits are not finite
    std::memset(bytes, 0, (bf16 ? 2 : 4) * width);
    return;
  }
  const auto factor = [&](int64_t i) {
    return tops ? exp_nonpositive((tops[i / kBlock] - s.top) * scale) : 1.0f;
  };
  const float p = column < 0 ? 0.0f : x[column] * factor(column) / s.mass;
  const float at_target = c * scale * (1.0f - p);
  const float k = -c * scale / s.mass;
  for (int64_t i = 0; i < columns; i += kBlock) {
    const int64_t length = i + kBlock < columns ? kBlock : columns - i;
    if (bf16)
      times_bf16(x + i, length, k * factor(i), bytes + 2 * i);
    else
      times(x + i, length, k * factor(i));
  }
  if (bf16) {
    std::memset(bytes + 2 * columns, 0, 2 * (width - columns));
    const uint16_t h = to_bf16(at_target);
    if (column >= 0) std::memcpy(bytes + 2 * column, &h, 2);
  } else {
    std::memset(x + columns, 0, 4 * (width - columns));
    if (column >= 0) x[column] = at_target;
  }
}

int64_t target_column(const Rows& a, int64_t row) {
  const int64_t column = a.target[row] - a.first;
  return column >= 0 && column < a.columns ? column : -1;
}

}  // namespace

void cpu_row_stats(const Rows& a, float* out, int64_t count, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const float* x = a.x + r * a.stride;
    const Stat s = statistics(const_cast<float*>(x), a.columns, a.scale, nullptr);
    const int64_t column = target_column(a, r);
    out[r] = s.top;
    out[count + r] = s.mass;
    out[2 * count + r] = s.moment;
    out[3 * count + r] = column < 0 ? -INFINITY : x[column];
  }
}

void cpu_row_grads(const Rows& a, const float* top, const float* mass, const float* coefficient,
                   bool bf16, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    float* x = a.x + r * a.stride;
    if (coefficient[r] != 0.0f) exponentials(x, a.columns, top[r], a.scale);
    const Stat s{top[r], mass[r], 0.0f};
    finish(x, a.width, a.columns, target_column(a, r), coefficient[r], a.scale, s, nullptr, bf16);
  }
}

void cpu_cispo_rows(const Rows& a, const CispoArgs& c, bool bf16, float* out, int64_t count,
                    int64_t begin, int64_t end) {
  const std::unique_ptr<float[]> tops(new float[a.columns / kBlock + 1]);
  for (int64_t r = begin; r < end; ++r) {
    float* x = a.x + r * a.stride;
    const int64_t column = target_column(a, r);
    const float x_target = column < 0 ? -INFINITY : x[column];
    const Stat s = statistics(x, a.columns, a.scale, tops.get());
    const float logp = log_prob(s, x_target, a.scale);
    const Term t = cispo(logp, c.generator_logp[r], c.advantage[r], c.weight[r], c.cap);
    finish(x, a.width, a.columns, column, t.coefficient, a.scale, s, tops.get(), bf16);
    const float values[5] = {logp, entropy(s), t.ratio, t.coefficient, t.loss};
    for (int i = 0; i < 5; ++i) out[i * count + r] = values[i];
  }
}

void cpu_merge_rows(const float* stats, int64_t shards, int64_t count, float scale, float* out) {
  for (int64_t r = 0; r < count; ++r) {
    Stat s = stat_empty();
    float x_target = -INFINITY;  // one shard holds the target
    for (int64_t k = 0; k < shards; ++k) {
      const float* p = stats + 4 * count * k + r;
      s = merge(s, {p[0], p[count], p[2 * count]}, scale);
      x_target = p[3 * count] == -INFINITY ? x_target : p[3 * count];
    }
    const float values[4] = {log_prob(s, x_target, scale), entropy(s), s.top, s.mass};
    for (int i = 0; i < 4; ++i) out[i * count + r] = values[i];
  }
}

void cpu_cispo_terms(const float* logp, const CispoArgs& c, int64_t count, float* out) {
  for (int64_t r = 0; r < count; ++r) {
    const Term t = cispo(logp[r], c.generator_logp[r], c.advantage[r], c.weight[r], c.cap);
    out[r] = t.ratio;
    out[count + r] = t.coefficient;
    out[2 * count + r] = t.loss;
  }
}

}  // namespace mrl
