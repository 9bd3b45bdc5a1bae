// Where a product goes, and what is done to it on the way.
#pragma once

#include "packed.h"
#include "simd.h"

namespace ISA {

struct Target {
  const float* bias;
  const float* residual;
  float* y;
  int64_t rows;  // of the weight: the width of y
  int32_t activation;
};

// The last tile, partly beyond the weight.
__attribute__((noinline)) static void finish_last(const Target& t, int64_t m, int64_t tile, const vf* v) {
  int64_t first = tile * TILE, at = m * t.rows + first;
  int count = (int)(t.rows - first);
  float values[TILE];
  for (int i = 0; i < TV; i++) storeu(values + i * VL, v[i]);
  for (int i = 0; i < count; i++) {
    float x = values[i];
    if (t.bias) x += t.bias[first + i];
    x = activation(splat(x), t.activation)[0];
    if (t.residual) x += t.residual[at + i];
    t.y[at + i] = x;
  }
}

// Bias, activation and residual of 16 outputs of one row.
__attribute__((always_inline)) static inline void finish(const Target& t, int64_t m, int64_t tile, const vf* v) {
  int64_t first = tile * TILE, at = m * t.rows + first;
  if (t.rows - first < TILE) return finish_last(t, m, tile, v);
  for (int i = 0; i < TV; i++) {
    vf x = v[i];
    if (t.bias) x += loadu<vf>(t.bias + first + i * VL);
    if (t.activation) x = activation(x, t.activation);
    if (t.residual) x += loadu<vf>(t.residual + at + i * VL);
    storeu(t.y + at + i * VL, x);
  }
}

// Calls f.template operator()<R>() for R = rows, 1 to MAX.
template <int MAX, class F> static void with_rows(int rows, F&& f) {
  if constexpr (MAX > 1) {
    if (rows < MAX) return with_rows<MAX - 1>(rows, f);
  }
  f.template operator()<MAX>();
}

// Blocks of nearly equal height cover M rows; `panel` tiles at a time, which stay in the cache while the rows pass.
template <int MAX, class F> static void cover(int64_t m, int64_t first, int64_t last, int64_t panel, F&& f) {
  int64_t blocks = (m + MAX - 1) / MAX;
  for (int64_t tile = first; tile < last; tile += panel)
    for (int64_t b = 0; b < blocks; b++) {
      int64_t start = m * b / blocks, rows = m * (b + 1) / blocks - start;
      with_rows<MAX>((int)rows, [&]<int R>() { f.template operator()<R>(start, tile, least(tile + panel, last)); });
    }
}

}  // namespace ISA
