// Inner loops and packing of gemm_bf16.cpp. A "word" holds the bf16 numbers k (low) and k + 1.
//
//   left   rows of words, [m][k2] at any stride: the operand whose rows are rows of the result
//   right  [k2][64] words, contiguous: 64 columns of the result, zero beyond the matrix
//
// k2 is a multiple of 16 (one AMX step of 32 numbers).
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace mrl {
namespace {

constexpr int64_t kStep = 16;
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t words(int64_t k) { return (k + 31) / 32 * kStep; }

struct Words {  // 64-byte aligned memory
  uint32_t* p;
  explicit Words(int64_t n)
      : p(static_cast<uint32_t*>(std::aligned_alloc(64, static_cast<size_t>((n + 15) / 16 * 64)))) {
    if (p == nullptr) std::abort();
  }
  ~Words() { std::free(p); }
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;
};

// ---- packing ----------------------------------------------------------------------------------

inline void transpose16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}

// out[j * out_stride + i] = in[i * in_stride + j] for 16 x 16 words.
inline void transpose16(const uint32_t* in, int64_t in_stride, uint32_t* out, int64_t out_stride) {
  __m512i r[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(in + i * in_stride);
  transpose16(r);
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * out_stride, r[i]);
}

// Copies rows of K numbers and pads them with zeros to k2 words.
inline void copy_rows(const uint16_t* in, int64_t stride, int64_t rows, int64_t K, uint32_t* out,
                      int64_t k2) {
  for (int64_t i = 0; i < rows; ++i) {
    char* o = reinterpret_cast<char*>(out + i * k2);
    std::memcpy(o, in + i * stride, static_cast<size_t>(2 * K));
    std::memset(o + 2 * K, 0, static_cast<size_t>(4 * k2 - 2 * K));
  }
}

// Packs `columns` <= 64 rows of w (K numbers each) into a right panel: a transposition of words.
inline void pack_transposed(const uint16_t* w, int64_t stride, int64_t columns, int64_t K,
                            uint32_t* scratch, uint32_t* out) {
  const int64_t k2 = words(K);
  const uint32_t* rows = reinterpret_cast<const uint32_t*>(w);
  int64_t row_stride = stride / 2;
  if (K % 32 != 0 || stride % 2 != 0 || columns < kPanel) {
    std::memset(scratch, 0, static_cast<size_t>(4 * kPanel * k2));
    copy_rows(w, stride, columns, K, scratch, k2);
    rows = scratch, row_stride = k2;
  }
  for (int64_t n = 0; n < kPanel; n += 16)
    for (int64_t k = 0; k < k2; k += 16)
      transpose16(rows + n * row_stride + k, row_stride, out + k * kPanel + n, kPanel);
}

inline __mmask16 mask_of(int64_t n) {  // the first n of 16
  return n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1u);
}

// Packs `columns` <= 64 columns of K rows into a right panel: pairs of rows, interleaved.
inline void pack_pairs(const uint16_t* in, int64_t stride, int64_t K, int64_t columns,
                       uint32_t* out) {
  const int64_t k2 = words(K);
  for (int64_t k = 0; k < k2; ++k)
    for (int64_t j = 0; j < kPanel; j += 16) {
      const __mmask16 m = mask_of(columns - j);
      const __mmask16 lo = 2 * k < K ? m : 0, hi = 2 * k + 1 < K ? m : 0;
      const uint16_t* p = in + 2 * k * stride + j;
      const __m512i a = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lo, p));
      const __m512i b = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(hi, p + stride));
      _mm512_store_si512(out + k * kPanel + j, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
    }
}

// Packs 64 columns of d into left rows [64][k2], those of the transposed d.
inline void pack_columns(const uint16_t* d, int64_t stride, int64_t K, int64_t columns,
                         uint32_t* scratch, uint32_t* out) {
  const int64_t k2 = words(K);
  pack_pairs(d, stride, K, columns, scratch);
  for (int64_t k = 0; k < k2; k += 16)
    for (int64_t n = 0; n < kPanel; n += 16)
      transpose16(scratch + k * kPanel + n, kPanel, out + n * k2 + k, k2);
}

// ---- result[m][n] (+)= left[m] . right[n]; n <= 64 ----------------------------------------------

struct Product {
  const uint32_t* left;
  int64_t left_stride;  // words
  const uint32_t* right;
  int64_t k2;
  float* out;
  int64_t out_stride;
  int64_t rows, columns;
  bool accumulate;
};

template <int M>
void avx512_rows(const Product& p, int64_t m) {
  __m512 c[M][4];
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < 4; ++j)
      c[i][j] = p.accumulate ? _mm512_maskz_loadu_ps(mask_of(p.columns - 16 * j),
                                                     p.out + (m + i) * p.out_stride + 16 * j)
                             : _mm512_setzero_ps();
  const uint32_t* left = p.left + m * p.left_stride;
  for (int64_t k = 0; k < p.k2; ++k) {
    __m512bh b[4];
    for (int j = 0; j < 4; ++j)
      b[j] = reinterpret_cast<__m512bh>(_mm512_load_si512(p.right + k * kPanel + 16 * j));
#pragma GCC unroll 6
    for (int i = 0; i < M; ++i) {
      const __m512bh a = reinterpret_cast<__m512bh>(
          _mm512_set1_epi32(static_cast<int>(left[i * p.left_stride + k])));
      for (int j = 0; j < 4; ++j) c[i][j] = _mm512_dpbf16_ps(c[i][j], a, b[j]);
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < 4; ++j)
      _mm512_mask_storeu_ps(p.out + (m + i) * p.out_stride + 16 * j, mask_of(p.columns - 16 * j),
                            c[i][j]);
}

inline void avx512_product(const Product& p) {
  int64_t m = 0;
  for (; m + 6 <= p.rows; m += 6) avx512_rows<6>(p, m);
  switch (p.rows - m) {
    case 5: return avx512_rows<5>(p, m);
    case 4: return avx512_rows<4>(p, m);
    case 3: return avx512_rows<3>(p, m);
    case 2: return avx512_rows<2>(p, m);
    case 1: return avx512_rows<1>(p, m);
    default: return;
  }
}

// 32 x 32 results in four AMX tiles; blocks that extend beyond the matrix go through buffers.
inline void amx_block(const Product& p, int64_t m, int64_t n, uint32_t* left_buffer) {
  const int64_t rows = least(32, p.rows - m), columns = least(32, p.columns - n);
  const uint32_t* left = p.left + m * p.left_stride;
  int64_t left_stride = p.left_stride;
  if (rows < 32) {
    std::memset(left_buffer, 0, static_cast<size_t>(4 * 32 * p.k2));
    for (int64_t i = 0; i < rows; ++i)
      std::memcpy(left_buffer + i * p.k2, left + i * left_stride, static_cast<size_t>(4 * p.k2));
    left = left_buffer, left_stride = p.k2;
  }
  alignas(64) float edge[32 * 32];
  float* out = p.out + m * p.out_stride + n;
  int64_t stride = p.out_stride;
  const bool is_edge = rows < 32 || columns < 32;
  if (is_edge) {
    std::memset(edge, 0, sizeof edge);
    for (int64_t i = 0; p.accumulate && i < rows; ++i)
      std::memcpy(edge + 32 * i, out + i * stride, static_cast<size_t>(4 * columns));
    out = edge, stride = 32;
  }
  const size_t left_bytes = static_cast<size_t>(4 * left_stride), right_bytes = 4 * kPanel;
  const size_t out_bytes = static_cast<size_t>(4 * stride);
  if (p.accumulate) {
    _tile_loadd(0, out, out_bytes);
    _tile_loadd(1, out + 16, out_bytes);
    _tile_loadd(2, out + 16 * stride, out_bytes);
    _tile_loadd(3, out + 16 * stride + 16, out_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const uint32_t* right = p.right + n;
  for (int64_t k = 0; k < p.k2; k += kStep) {
    _tile_loadd(4, left + k, left_bytes);
    _tile_loadd(6, right + k * kPanel, right_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + k * kPanel + 16, right_bytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, left + 16 * left_stride + k, left_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, out_bytes);
  _tile_stored(1, out + 16, out_bytes);
  _tile_stored(2, out + 16 * stride, out_bytes);
  _tile_stored(3, out + 16 * stride + 16, out_bytes);
  for (int64_t i = 0; is_edge && i < rows; ++i)
    std::memcpy(p.out + (m + i) * p.out_stride + n, edge + 32 * i,
                static_cast<size_t>(4 * columns));
}

struct alignas(64) TileConfig {  // palette 1: eight tiles of 16 rows of 64 bytes
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

class Tiles {  // configures the tile registers of this thread during one task
 public:
  explicit Tiles(bool on) : on_(on) {
    const TileConfig config;
    if (on_) _tile_loadconfig(&config);
  }
  ~Tiles() {
    if (on_) _tile_release();
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  bool on_;
};

inline void product(bool amx, const Product& p, uint32_t* left_buffer) {
  if (!amx) return avx512_product(p);
  for (int64_t m = 0; m < p.rows; m += 32)
    for (int64_t n = 0; n < p.columns; n += 32) amx_block(p, m, n, left_buffer);
}

}  // namespace
}  // namespace mrl
