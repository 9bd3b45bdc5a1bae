// Products with fp32, bf16 and fp16 weights.
#pragma once

#include "pool.h"
#include "target.h"

namespace ISA {

#if defined(__AVX512F__)
constexpr int MAX_ROWS_FLOAT = 12;
constexpr int tiles_of_float(int rows) { return rows == 1 ? 8 : rows <= 4 ? 4 : 2; }
#else
constexpr int MAX_ROWS_FLOAT = TV == 2 ? 6 : 4;
constexpr int tiles_of_float(int rows) { return rows == 1 && TV == 2 ? 4 : 1; }
#endif

template <int KIND> static inline vf weights_float(const uint8_t* p, int64_t at) {
  if (KIND == FP32) return loadu<vf>((const float*)p + at);
  return KIND == BF16 ? from_bf16((const uint16_t*)p + at) : from_half((const uint16_t*)p + at);
}

// The rows of x: where they are, or `stride` apart where that is not their width.
struct Floats {
  const float* values;
  int64_t stride;
};

// Many rows a power of two apart would all fall into the same few sets of the cache: copies lie off it.
static Floats spread(const Weight& w, int64_t m, const float* x) {
  static thread_local Buffer<float> memory;
  if (m == 1) return {x, w.columns};
  Floats f{nullptr, round_up(w.columns, 16) + 16};
  float* to = memory.take(m * f.stride);
  f.values = to;
  pool::parallel((int)least<int64_t>(m, m * w.columns / 65536), [&](int part, int parts) {
    for (int64_t i = m * part / parts; i < m * (part + 1) / parts; i++) std::memcpy(to + i * f.stride, x + i * w.columns, 4 * w.columns);
  });
  return f;
}

template <int KIND, int MR, int NT>
static void block_float(const Weight& w, const Floats& x, const Target& t, int64_t m, int64_t tile) {
  constexpr int NV = NT * TV;
  vf acc[MR][NV] = {};
  const uint8_t* data[NT];
  for (int n = 0; n < NT; n++) data[n] = tile_at(w, tile + n);
  const float* a = x.values + m * x.stride;
  for (int64_t k = 0; k < w.columns; k++) {
    vf wv[NV];
    for (int n = 0; n < NT; n++)
      for (int i = 0; i < TV; i++) wv[n * TV + i] = weights_float<KIND>(data[n], k * TILE + i * VL);
#pragma GCC unroll 12
    for (int i = 0; i < MR; i++) {
      vf av = splat(a[i * x.stride + k]);
#pragma GCC unroll 8
      for (int j = 0; j < NV; j++) acc[i][j] = fma(av, wv[j], acc[i][j]);
    }
  }
  for (int i = 0; i < MR; i++)
    for (int n = 0; n < NT; n++) finish(t, m + i, tile + n, &acc[i][n * TV]);
}

template <int KIND, int MR>
static void rows_float(const Weight& w, const Floats& x, const Target& t, int64_t m, int64_t first, int64_t last) {
  constexpr int NT = tiles_of_float(MR);
  for (; first + NT <= last; first += NT) block_float<KIND, MR, NT>(w, x, t, m, first);
  for (; first < last; first++) block_float<KIND, MR, 1>(w, x, t, m, first);
}

template <int KIND> static void linear_float(const Weight& w, int64_t m, const Floats& x, const Target& t, int64_t first, int64_t last) {
  cover<MAX_ROWS_FLOAT>(m, first, last, m <= MAX_ROWS_FLOAT ? last : 2, [&]<int R>(int64_t start, int64_t from, int64_t to) {
    rows_float<KIND, R>(w, x, t, start, from, to);
  });
}

}  // namespace ISA
