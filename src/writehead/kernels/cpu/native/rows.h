// Rows of x as int8 under one scale each, but for their largest values, which stay fp32. Without those, one channel of a
// hundred times the others' size leaves the others two or three bits.
#pragma once

#include "packed.h"
#include "pool.h"
#include "simd.h"

namespace ISA {

constexpr int OUTLIERS = 8;

struct Rows {
  int8_t* values;  // [M, stride], zero beyond the columns
  int64_t stride;
  float* scale;  // [M]
  int32_t* sums;  // [M, groups]: the sum of each group's values
  int64_t groups;
  float (*outliers)[OUTLIERS];
  int32_t (*places)[OUTLIERS];
  int count;
};

// Moves the largest values of `x` [n] to the outliers; ties go to the first. `tops` holds the largest of each block.
static inline void split_outliers(float* x, int64_t n, float* tops, float* outliers, int32_t* places, int count) {
  int64_t blocks = (n + BLOCK - 1) / BLOCK;
  for (int64_t b = 0; b < blocks; b++) tops[b] = largest(x + b * BLOCK, least<int64_t>(BLOCK, n - b * BLOCK));
  for (int o = 0; o < count; o++) {
    float top = largest(tops, blocks);
    int64_t b = 0;
    while (tops[b] != top) b++;
    int64_t i = b * BLOCK;
    while (fabsf(x[i]) != top) i++;
    outliers[o] = x[i];
    places[o] = (int32_t)i;
    x[i] = 0;
    tops[b] = largest(x + b * BLOCK, least<int64_t>(BLOCK, n - b * BLOCK));
  }
}

static inline void quantize_row(const Rows& r, int64_t m, const float* x, int64_t n, int64_t group, float* copy, float* tops) {
  int8_t* q = r.values + m * r.stride;
  std::memset(q, 0, r.stride);
  std::memset(r.sums + m * r.groups, 0, 4 * r.groups);
  std::memcpy(copy, x, 4 * n);
  vf check{};
  int64_t i = 0;
  for (; i + VL <= n; i += VL) check += loadu<vf>(x + i) * 0.0f;
  float finite = sum_lanes(check);
  for (; i < n; i++) finite += x[i] * 0.0f;
  if (finite != 0) {  // a NaN or infinity makes the whole row NaN
    r.scale[m] = finite;
    for (int o = 0; o < OUTLIERS; o++) r.outliers[m][o] = 0, r.places[m][o] = 0;
    return;
  }
  split_outliers(copy, n, tops, r.outliers[m], r.places[m], r.count);
  float top = largest(copy, n);
  float inverse = top > 1e-30f ? 127.0f / top : 0.0f;
  r.scale[m] = top > 1e-30f ? top / 127.0f : 0.0f;
  for (i = 0; i + VL <= n; i += VL) {
    vi v = round_int(loadu<vf>(copy + i) * inverse);
    typedef int8_t vb __attribute__((vector_size(VL)));
    storeu(q + i, __builtin_convertvector(v, vb));
  }
  for (; i < n; i++) q[i] = (int8_t)round_int(splat(copy[i] * inverse))[0];
  for (int64_t g = 0; g < r.groups; g++) {
    int32_t sum = 0;
    for (int64_t k = 0; k < group; k++) sum += q[g * group + k];
    r.sums[m * r.groups + g] = sum;
  }
}

// The caller's memory is its own thread's and lives until its next call; the pool's threads only read it.
static inline Rows quantize(const Weight& w, int64_t m, int64_t padded_m, const float* x) {
  static thread_local Buffer<int8_t> values;
  static thread_local Buffer<float> scale, outliers;
  static thread_local Buffer<int32_t> sums, places;
  int64_t columns = padded_columns(w), group = w.kind == INT4 ? w.group : columns;
  Rows r;
  r.stride = columns + BLOCK;  // off the powers of two, so that rows do not fall into the same sets of the cache
  r.groups = columns / group;
  r.count = (int)least<int64_t>(OUTLIERS, w.columns);
  r.values = values.take(padded_m * r.stride);
  r.scale = scale.take(m);
  r.sums = sums.take(m * r.groups);
  r.outliers = (float(*)[OUTLIERS])outliers.take(m * OUTLIERS);
  r.places = (int32_t(*)[OUTLIERS])places.take(m * OUTLIERS);
  std::memset(r.values + m * r.stride, 0, (padded_m - m) * r.stride);
  pool::parallel((int)least<int64_t>(m, m * w.columns / 8192), [&](int part, int parts) {
    static thread_local Buffer<float> memory;
    float* copy = memory.take(w.columns + w.columns / BLOCK + 1);
    for (int64_t i = m * part / parts; i < m * (part + 1) / parts; i++)
      quantize_row(r, i, x + i * w.columns, w.columns, group, copy, copy + w.columns);
  });
  return r;
}

}  // namespace ISA
