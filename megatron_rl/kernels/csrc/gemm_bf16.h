// bf16 x bf16 -> fp32 GEMMs of the LM head on x86, without torch. bf16 numbers are uint16_t, sizes
// are arbitrary, and every sum has a fixed order that does not depend on the number of threads.
//
//   logits       x[C, V]  = h[C, H] w[V, H]^T      work items: panels of 64 columns of x
//   hidden grad  o[C, H]  = d[C, V] w[V, H]        work items: panels of 64 columns of o
//   weight grad  g[V, H] (+)= d[C, V]^T h[C, H]    work items: blocks of 64 rows of g
#pragma once
#include <cstdint>

namespace mrl {

// The numbers of library.CPU_KERNELS.
enum GemmKind : int {
  kGemmNone = 0,    // generic: torch multiplies fp32 upcasts
  kGemmAvx512 = 1,  // vdpbf16ps
  kGemmAmx = 2,     // tdpbf16ps
};

constexpr int64_t kPanel = 64;
inline int64_t panels(int64_t n) { return (n + kPanel - 1) / kPanel; }

// Returns the fastest kind; kGemmNone where fp32 products are faster.
int gemm_best_kind();
// Returns true if this processor runs a kind; the first call requests AMX from the system.
bool gemm_can_run(int kind);

void gemm_logits(int kind, const uint16_t* h, int64_t h_stride, const uint16_t* w, int64_t w_stride,
                 float* x, int64_t x_stride, int64_t C, int64_t H, int64_t V, int64_t begin,
                 int64_t end);
void gemm_hidden_grad(int kind, const uint16_t* d, int64_t d_stride, const uint16_t* w,
                      int64_t w_stride, float* o, int64_t o_stride, int64_t C, int64_t H, int64_t V,
                      int64_t begin, int64_t end);
// `packed` is gemm_pack_hidden's result: gemm_packed_words(C, H) 32-bit words, 64-byte aligned.
void gemm_weight_grad(int kind, const uint16_t* d, int64_t d_stride, const uint32_t* packed,
                      float* g, int64_t g_stride, int64_t C, int64_t H, int64_t V, bool accumulate,
                      int64_t begin, int64_t end);
int64_t gemm_packed_words(int64_t C, int64_t H);
void gemm_pack_hidden(const uint16_t* h, int64_t h_stride, int64_t C, int64_t H, uint32_t* packed);

}  // namespace mrl
