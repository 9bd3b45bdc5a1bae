// Products with int8 weights.
#pragma once

#include "rows.h"
#include "target.h"

namespace ISA {

#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;
// Four streams of weights through few rows: one alone reads a fifth less from memory.
constexpr int tiles_of(int rows) { return rows <= 6 ? 4 : 2; }
constexpr int unroll_of(int rows) { return rows <= 2 ? 2 : 1; }
#else
constexpr int MAX_ROWS = TV == 2 ? 5 : 4;
constexpr int tiles_of(int) { return 1; }
constexpr int unroll_of(int rows) { return rows == 1 ? 2 : 1; }
#endif

// Tiles of int8 weights side by side: those of a packed weight, or some made of another one's.
struct Panel {
  const uint8_t* data;  // of the tile `first`
  int64_t first, columns;
  const float* scales;  // of all channels of the weight

  const uint8_t* at(int64_t tile) const { return data + (tile - first) * columns * TILE; }
};

static inline void finish_integer(const float* scales, const Rows& r, const Target& t, int64_t m, int64_t tile, const vi* sums) {
  vf v[TV];
  for (int i = 0; i < TV; i++) v[i] = to_float(sums[i]) * r.scale[m] * loadu<vf>(scales + tile * TILE + i * VL);
  finish(t, m, tile, v);
}

static inline void finish_int8(const Panel& p, const Rows& r, const Target& t, int64_t m, int64_t tile, vi* sums) {
  const uint8_t* data = p.at(tile);
  add_excess(r.excess[m], sums, [&](int64_t k, int i) { return loadu<vi>(data + k / 4 * 64 + 4 * VL * i); });
  finish_integer(p.scales, r, t, m, tile, sums);
}

// sums [MR, NT * TV] = MR rows of x, `stride` bytes apart, by NT tiles of `columns` inputs. A function of its own and few
// arguments: the accumulators leave no register to spare.
template <int MR, int NT, int KU>
__attribute__((noinline)) static void dots(const uint8_t* weights, int64_t columns, const int8_t* x, int64_t stride, vi (*sums)[NT * TV]) {
  vi acc[KU][MR][NT * TV] = {};
  for (int64_t k = 0; k < columns; k += 4 * KU)
#pragma GCC unroll 8
    for (int u = 0; u < KU; u++) {
      Weights wv[NT * TV];
      for (int n = 0; n < NT; n++) {
        const uint8_t* from = weights + (n * columns + k + 4 * u) * TILE;
        if (MR <= 2) __builtin_prefetch(from + 2048);
        for (int i = 0; i < TV; i++) wv[n * TV + i] = weights_i8(loadu<vi>(from + 4 * VL * i));
      }
#pragma GCC unroll 12
      for (int i = 0; i < MR; i++) {
        Values av = values_i8(x + i * stride + k + 4 * u);
#pragma GCC unroll 8
        for (int j = 0; j < NT * TV; j++) acc[u][i][j] = dot_i8(acc[u][i][j], wv[j], av);
      }
    }
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NT * TV; j++) {
      for (int u = 1; u < KU; u++) acc[0][i][j] += acc[u][i][j];
      sums[i][j] = acc[0][i][j];
    }
}

template <int MR, int NT, int KU>
static void block_int8(const Panel& p, const Rows& r, const Target& t, int64_t m, int64_t tile) {
  vi sums[MR][NT * TV];
  dots<MR, NT, KU>(p.at(tile), p.columns, r.values + m * r.stride, r.stride, sums);
  for (int i = 0; i < MR; i++) {
    int32_t sum = 0;  // of all values of the row
    if (OFFSET)
      for (int64_t g = 0; g < r.groups; g++) sum += r.sums[(m + i) * r.groups + g];
    for (int j = 0; j < NT * TV; j++) sums[i][j] -= OFFSET * sum;
    for (int n = 0; n < NT; n++) finish_int8(p, r, t, m + i, tile + n, &sums[i][n * TV]);
  }
}

template <int MR> static void rows_int8(const Panel& p, const Rows& r, const Target& t, int64_t m, int64_t first, int64_t last) {
  constexpr int NT = tiles_of(MR), KU = unroll_of(MR);
  for (; first + NT <= last; first += NT) block_int8<MR, NT, KU>(p, r, t, m, first);
  for (; first < last; first++) block_int8<MR, 1, KU>(p, r, t, m, first);
}

// Rows start.. (`rows` of them) by the panel's tiles first..last.
static void vectors_int8(const Panel& p, const Rows& r, const Target& t, int64_t start, int64_t rows, int64_t first, int64_t last) {
  cover<MAX_ROWS>(rows, first, last, rows <= MAX_ROWS ? last : 2, [&]<int R>(int64_t row, int64_t from, int64_t to) {
    rows_int8<R>(p, r, t, start + row, from, to);
  });
}

}  // namespace ISA
