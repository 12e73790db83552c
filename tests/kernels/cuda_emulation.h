// Runs the kernels of rows_cuda.cu on CPU: every CUDA thread is a fiber, blocks run one by one.
// Fibers run until a barrier or a shuffle, in the order that `mrl_emulation_order` names, so that a
// missing barrier shows as a wrong result. It shows nothing about speed, and nothing of the device's
// own arithmetic (__expf).
#pragma once
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "row_math.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __shared__ static

struct float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat16 __float2bfloat16(float f) { return {mrl::to_bf16(f)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {__float2bfloat16(a), __float2bfloat16(b)};
}

struct Index {
  unsigned x = 0;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;
inline int mrl_emulation_order = 0;  // 0: ascending, 1: descending, 2: a fixed shuffle

using cudaError_t = int;
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }

namespace emulation {

struct Barrier {
  int size = 0, arrived = 0;
  long generation = 0;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  unsigned thread = 0;
  bool done = false;
  Barrier* waits_for = nullptr;
  long generation = 0;
};

struct Block {
  std::vector<Fiber> fibers;
  Barrier whole;
  std::vector<Barrier> warps;
  std::vector<float> lanes;
  std::function<void()> body;
};

inline Block* block;
inline Fiber* running;
inline ucontext_t scheduler;

inline void wait(Barrier& b) {
  if (++b.arrived == b.size) {
    b.arrived = 0;
    ++b.generation;
    return;
  }
  running->waits_for = &b;
  running->generation = b.generation;
  swapcontext(&running->context, &scheduler);
}

inline void enter() {
  block->body();
  running->done = true;
  swapcontext(&running->context, &scheduler);
}

inline void run_block(int threads, const std::function<void()>& body) {
  constexpr size_t kStack = 32 * 1024;
  Block b;
  b.body = body;
  b.whole.size = threads;
  b.warps.resize((threads + 31) / 32);
  for (Barrier& w : b.warps) w.size = 32;
  b.lanes.resize(threads);
  b.fibers = std::vector<Fiber>(threads);
  block = &b;
  std::vector<int> order(threads);
  for (int i = 0; i < threads; ++i) {
    order[i] = mrl_emulation_order == 1   ? threads - 1 - i
               : mrl_emulation_order == 2 ? static_cast<int>((i * 197L + 71) % threads)
                                          : i;
    Fiber& f = b.fibers[i];
    f.thread = i;
    f.stack.reset(new char[kStack]);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = kStack;
    makecontext(&f.context, enter, 0);
  }
  for (bool alive = true; alive;) {
    alive = false;
    for (const int i : order) {
      Fiber& f = b.fibers[i];
      if (f.done) continue;
      alive = true;
      if (f.waits_for != nullptr && f.waits_for->generation == f.generation) continue;
      f.waits_for = nullptr;
      running = &f;
      threadIdx.x = f.thread;
      swapcontext(&scheduler, &f.context);
    }
  }
}

}  // namespace emulation

// threadIdx is one variable that the scheduler sets; after a switch it is set again before the fiber
// goes on.
inline void __syncthreads() { emulation::wait(emulation::block->whole); }

inline float __shfl_xor_sync(unsigned, float value, int offset) {
  const unsigned t = threadIdx.x;
  emulation::Barrier& warp = emulation::block->warps[t / 32];
  emulation::block->lanes[t] = value;
  emulation::wait(warp);
  const float other = emulation::block->lanes[t ^ static_cast<unsigned>(offset)];
  emulation::wait(warp);
  return other;
}

template <typename... P, typename... A>
int launch(void (*kernel)(P...), int64_t blocks, int threads, void*, A... args) {
  gridDim.x = static_cast<unsigned>(blocks);
  blockDim.x = static_cast<unsigned>(threads);
  for (int64_t b = 0; b < blocks; ++b) {
    blockIdx.x = static_cast<unsigned>(b);
    emulation::run_block(threads, [&] { kernel(args...); });
  }
  return 0;
}
