// Blocking of the bf16 -> fp32 GEMMs. Compiled with AVX-512 and AMX flags: call nothing in this
// file unless gemm_can_run returned true.
#include "gemm_bf16.h"

#include "gemm_tiles.h"

namespace mrl {

void gemm_logits(int kind, const uint16_t* h, int64_t h_stride, const uint16_t* w, int64_t w_stride,
                 float* x, int64_t x_stride, int64_t C, int64_t H, int64_t V, int64_t begin,
                 int64_t end) {
  const bool amx = kind == kGemmAmx;
  const Tiles tiles(amx);
  const int64_t k2 = words(H);
  const bool direct = H % 32 == 0 && h_stride % 2 == 0;
  const Words left(direct ? 0 : C * k2), right(kPanel * k2), scratch(kPanel * k2);
  if (!direct) copy_rows(h, h_stride, C, H, left.p, k2);
  for (int64_t p = begin; p < end; ++p) {
    const int64_t v = p * kPanel, columns = least(kPanel, V - v);
    pack_transposed(w + v * w_stride, w_stride, columns, H, scratch.p, right.p);
    product(amx,
            {direct ? reinterpret_cast<const uint32_t*>(h) : left.p, direct ? h_stride / 2 : k2,
             right.p, k2, x + v, x_stride, C, columns, false},
            scratch.p);
  }
}

void gemm_hidden_grad(int kind, const uint16_t* d, int64_t d_stride, const uint16_t* w,
                      int64_t w_stride, float* o, int64_t o_stride, int64_t C, int64_t H, int64_t V,
                      int64_t begin, int64_t end) {
  constexpr int64_t kDepth = 512;  // of V at a time: all panels of w and this part of d fit in L2
  const bool amx = kind == kGemmAmx;
  const Tiles tiles(amx);
  const int64_t most = words(kDepth);
  const Words left(C * most), right((end - begin) * kPanel * most), scratch(32 * most);
  for (int64_t v = 0; v < V; v += kDepth) {
    const int64_t depth = least(kDepth, V - v), k2 = words(depth);
    const bool direct = depth % 32 == 0 && d_stride % 2 == 0;
    if (!direct) copy_rows(d + v, d_stride, C, depth, left.p, k2);
    for (int64_t p = begin; p < end; ++p)
      pack_pairs(w + v * w_stride + p * kPanel, w_stride, depth, least(kPanel, H - p * kPanel),
                 right.p + (p - begin) * kPanel * most);
    for (int64_t m = 0; m < C; m += 32)
      for (int64_t p = begin; p < end; ++p) {
        const int64_t n = p * kPanel, stride = direct ? d_stride / 2 : k2;
        const uint32_t* from = direct ? reinterpret_cast<const uint32_t*>(d + v) : left.p;
        product(amx,
                {from + m * stride, stride, right.p + (p - begin) * kPanel * most, k2,
                 o + m * o_stride + n, o_stride, least(32, C - m), least(kPanel, H - n), v > 0},
                scratch.p);
      }
  }
}

int64_t gemm_packed_words(int64_t C, int64_t H) { return panels(H) * kPanel * words(C); }

void gemm_pack_hidden(const uint16_t* h, int64_t h_stride, int64_t C, int64_t H, uint32_t* packed) {
  for (int64_t p = 0; p < panels(H); ++p)
    pack_pairs(h + p * kPanel, h_stride, C, least(kPanel, H - p * kPanel),
               packed + p * kPanel * words(C));
}

void gemm_weight_grad(int kind, const uint16_t* d, int64_t d_stride, const uint32_t* packed,
                      float* g, int64_t g_stride, int64_t C, int64_t H, int64_t V, bool accumulate,
                      int64_t begin, int64_t end) {
  const bool amx = kind == kGemmAmx;
  const Tiles tiles(amx);
  const int64_t k2 = words(C);
  const Words left(kPanel * k2), scratch(kPanel * k2);
  for (int64_t b = begin; b < end; ++b) {
    const int64_t v = b * kPanel, rows = least(kPanel, V - v);
    pack_columns(d + v, d_stride, C, rows, scratch.p, left.p);
    for (int64_t p = 0; p < panels(H); ++p)
      product(amx,
              {left.p, k2, packed + p * kPanel * k2, k2, g + v * g_stride + p * kPanel, g_stride,
               rows, least(kPanel, H - p * kPanel), accumulate},
              scratch.p);
  }
}

}  // namespace mrl
