// Row kernels: one block per row. The row is read twice (statistics, gradient) and written once.
//
// The gradient is written in place, as fp32, or as bf16 into the front half of the row. A tile is
// kThreads * 4 columns; tile t in bf16 covers half of the bytes of the fp32 tile t / 2 and may be
// written after every thread has read that. A barrier after reading tile t allows the writes of
// tiles up to 2t + 1: barriers at t = 0, 1, 3, 7, ... are enough.
#if defined(MRL_EMULATE_CUDA)
#include "cuda_emulation.h"  // tests/kernels: these kernels on CPU threads
#else
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#endif

#include "rows_cuda.h"

namespace mrl {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kTile = kThreads * 4;

struct Quad {
  float v[4];
};

// Returns four logits from column i; those from `columns` on are -inf.
__device__ __forceinline__ Quad load4(const float* row, int64_t i, int64_t columns, bool aligned) {
  Quad q;
  if (aligned && i + 4 <= columns) {
    const float4 f = *reinterpret_cast<const float4*>(row + i);
    q.v[0] = f.x, q.v[1] = f.y, q.v[2] = f.z, q.v[3] = f.w;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) q.v[j] = i + j < columns ? row[i + j] : -INFINITY;
  }
  return q;
}

__device__ __forceinline__ Stat push4(Stat a, const Quad& q, float scale) {
  const float most = fmaxf(fmaxf(q.v[0], q.v[1]), fmaxf(q.v[2], q.v[3]));
  const float top = fmaxf(a.top, most);
  const float da = (a.top - top) * scale, ea = exp_nonpositive(da);
  a.moment = a.mass == 0.0f ? 0.0f : ea * (a.moment + da * a.mass);
  a.mass *= ea;
  a.top = top;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float d = (q.v[j] - top) * scale, e = exp_nonpositive(d);
    a.mass += e;
    a.moment += moment_term(d, e);
  }
  return a;
}

__device__ __forceinline__ Stat warp_merge(Stat a, int width, float scale) {
  for (int o = width / 2; o > 0; o /= 2) {
    const Stat b{__shfl_xor_sync(~0u, a.top, o), __shfl_xor_sync(~0u, a.mass, o),
                 __shfl_xor_sync(~0u, a.moment, o)};
    a = merge(a, b, scale);
  }
  return a;
}

// Returns the statistics of the block's row in every thread; a barrier follows all reads.
__device__ Stat row_stat(const float* row, int64_t columns, float scale, bool aligned) {
  __shared__ Stat parts[kWarps];
  Stat a = stat_empty();
  for (int64_t i = threadIdx.x * 4; i < columns; i += kTile)
    a = push4(a, load4(row, i, columns, aligned), scale);
  a = warp_merge(a, 32, scale);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = a;
  __syncthreads();
  return warp_merge(parts[threadIdx.x % kWarps], kWarps, scale);
}

struct Target {
  int64_t column;  // -1: not in this shard
  float logit;
};

__device__ __forceinline__ Target target_of(const Rows& a, const float* row) {
  const int64_t column = a.target[blockIdx.x] - a.first;
  const bool here = column >= 0 && column < a.columns;
  return {here ? column : -1, here ? row[column] : -INFINITY};
}

// Replaces the row by c * scale * (onehot - p), 0 in padded columns. All threads call it, after all
// reads of the row outside this function.
template <bool kBf16>
__device__ void write_gradient(float* row, const Rows& a, Target y, float top, float mass, float c,
                               bool aligned) {
  const float k = -c * a.scale / mass;
  const float at_target = c * a.scale * (1.0f - exp_nonpositive((y.logit - top) * a.scale) / mass);
  __nv_bfloat16* narrow = reinterpret_cast<__nv_bfloat16*>(row);
  int tile = 0;
  for (int64_t first = 0; first < a.width; first += kTile, ++tile) {
    const int64_t i = first + threadIdx.x * 4;
    Quad q = load4(row, i, a.columns, aligned);
    if (kBf16 && (tile & (tile + 1)) == 0) __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Coefficient 0 gives exact zeros, also where the logits are not finite.
      q.v[j] = c == 0.0f ? 0.0f : k * exp_nonpositive((q.v[j] - top) * a.scale);
      if (i + j == y.column) q.v[j] = c == 0.0f ? 0.0f : at_target;
      // k * 0 is not 0 where k is NaN or inf; padding is always 0.
      if (i + j >= a.columns) q.v[j] = 0.0f;
    }
    if (kBf16) {
      if (aligned && i + 4 <= a.width) {
        const __nv_bfloat162 lo = __floats2bfloat162_rn(q.v[0], q.v[1]);
        const __nv_bfloat162 hi = __floats2bfloat162_rn(q.v[2], q.v[3]);
        uint2 both;
        memcpy(&both.x, &lo, 4);
        memcpy(&both.y, &hi, 4);
        *reinterpret_cast<uint2*>(narrow + i) = both;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (i + j < a.width) narrow[i + j] = __float2bfloat16(q.v[j]);
      }
    } else if (aligned && i + 4 <= a.width) {
      *reinterpret_cast<float4*>(row + i) = make_float4(q.v[0], q.v[1], q.v[2], q.v[3]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (i + j < a.width) row[i + j] = q.v[j];
    }
  }
}

__global__ void __launch_bounds__(kThreads) stats_kernel(Rows a, bool aligned, float* out) {
  const float* row = a.x + blockIdx.x * a.stride;
  const Stat s = row_stat(row, a.columns, a.scale, aligned);
  if (threadIdx.x == 0) {
    const int64_t r = blockIdx.x, count = gridDim.x;
    out[r] = s.top;
    out[count + r] = s.mass;
    out[2 * count + r] = s.moment;
    out[3 * count + r] = target_of(a, row).logit;
  }
}

template <bool kBf16>
__global__ void __launch_bounds__(kThreads)
    grads_kernel(Rows a, bool aligned, const float* top, const float* mass,
                 const float* coefficient) {
  const int64_t r = blockIdx.x;
  float* row = a.x + r * a.stride;
  const Target y = target_of(a, row);
  __syncthreads();  // all threads read the target's logit before the row changes
  write_gradient<kBf16>(row, a, y, top[r], mass[r], coefficient[r], aligned);
}

template <bool kBf16>
__global__ void __launch_bounds__(kThreads)
    cispo_kernel(Rows a, CispoArgs c, bool aligned, float* out) {
  const int64_t r = blockIdx.x, count = gridDim.x;
  float* row = a.x + r * a.stride;
  const Target y = target_of(a, row);
  const Stat s = row_stat(row, a.columns, a.scale, aligned);  // contains a barrier
  const float logp = log_prob(s, y.logit, a.scale);
  const Term t = cispo(logp, c.generator_logp[r], c.advantage[r], c.weight[r], c.cap);
  write_gradient<kBf16>(row, a, y, s.top, s.mass, t.coefficient, aligned);
  if (threadIdx.x == 0) {
    out[r] = logp;
    out[count + r] = entropy(s);
    out[2 * count + r] = t.ratio;
    out[3 * count + r] = t.coefficient;
    out[4 * count + r] = t.loss;
  }
}

__global__ void merge_kernel(const float* stats, int64_t shards, int64_t count, float scale,
                             float* out) {
  const int64_t r = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (r >= count) return;
  Stat s = stat_empty();
  float x_target = -INFINITY;  // one shard holds the target
  for (int64_t k = 0; k < shards; ++k) {
    const float* p = stats + 4 * count * k + r;
    s = merge(s, {p[0], p[count], p[2 * count]}, scale);
    x_target = p[3 * count] == -INFINITY ? x_target : p[3 * count];
  }
  out[r] = log_prob(s, x_target, scale);
  out[count + r] = entropy(s);
  out[2 * count + r] = s.top;
  out[3 * count + r] = s.mass;
}

__global__ void terms_kernel(const float* logp, CispoArgs c, int64_t count, float* out) {
  const int64_t r = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (r >= count) return;
  const Term t = cispo(logp[r], c.generator_logp[r], c.advantage[r], c.weight[r], c.cap);
  out[r] = t.ratio;
  out[count + r] = t.coefficient;
  out[2 * count + r] = t.loss;
}

#if defined(__CUDACC__)
template <typename... P, typename... A>
int launch(void (*kernel)(P...), int64_t blocks, int threads, void* stream, A... args) {
  kernel<<<static_cast<unsigned>(blocks), threads, 0, static_cast<cudaStream_t>(stream)>>>(args...);
  return cudaGetLastError();
}
#endif

bool is_aligned(const Rows& a) {
  return a.stride % 4 == 0 && reinterpret_cast<uintptr_t>(a.x) % 16 == 0;
}

int64_t blocks(int64_t count) { return (count + 255) / 256; }

}  // namespace

int cuda_row_stats(const Rows& a, float* out, int64_t count, void* stream) {
  return launch(stats_kernel, count, kThreads, stream, a, is_aligned(a), out);
}

int cuda_row_grads(const Rows& a, const float* top, const float* mass, const float* coefficient,
                   bool bf16, int64_t count, void* stream) {
  const auto kernel = bf16 ? grads_kernel<true> : grads_kernel<false>;
  return launch(kernel, count, kThreads, stream, a, is_aligned(a), top, mass, coefficient);
}

int cuda_cispo_rows(const Rows& a, const CispoArgs& c, bool bf16, float* out, int64_t count,
                    void* stream) {
  const auto kernel = bf16 ? cispo_kernel<true> : cispo_kernel<false>;
  return launch(kernel, count, kThreads, stream, a, c, is_aligned(a), out);
}

int cuda_merge_rows(const float* stats, int64_t shards, int64_t count, float scale, float* out,
                    void* stream) {
  return launch(merge_kernel, blocks(count), 256, stream, stats, shards, count, scale, out);
}

int cuda_cispo_terms(const float* logp, const CispoArgs& c, int64_t count, float* out,
                     void* stream) {
  return launch(terms_kernel, blocks(count), 256, stream, logp, c, count, out);
}

const char* cuda_error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // namespace mrl
