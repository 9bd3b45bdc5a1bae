// Rows of x as int8 under one scale each. The scale is that of the largest values but for eight, which may lie beyond 127
// steps: what they have more is `excess`, in digits to the base 128, and joins the same integer sum. Without that, one
// channel of a hundred times the others' size leaves the others two or three bits.
#pragma once

#include "packed.h"
#include "pool.h"
#include "simd.h"

namespace ISA {

constexpr int OUTLIERS = 8;
constexpr int DIGITS = 3;  // a value has at most 128^3 steps

// What the values of a row have beyond 127 steps: first of the positive ones, then of the negative ones.
struct Excess {
  int8_t positive, count, digits;
  int32_t place[OUTLIERS];  // column
  int32_t word[DIGITS][OUTLIERS];  // a digit, in the byte that its column has in a word of four; the lowest digit first
};

struct Rows {
  int8_t* values;  // [M, stride], zero beyond the columns
  int64_t stride;
  float* scale;  // [M]
  int32_t* sums;  // [M, groups]: the sum of each group's values
  int64_t groups;
  Excess* excess;  // [M]
};

// Finds the largest values of `x` [n], which it sets to zero; ties go to the first. `tops` holds the largest of each block.
static inline void take_outliers(float* x, int64_t n, float* tops, float* outliers, int32_t* places, int count) {
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

static inline void note_excess(Excess& e, const float* outliers, const int32_t* places, int count, float inverse) {
  e = {};
  for (int sign = 1; sign >= -1; sign -= 2) {
    for (int o = 0; o < count; o++) {
      int32_t rest = sign * round_int(splat(outliers[o] * inverse))[0] - 127;
      if (rest <= 0) continue;
      e.place[e.count] = places[o];
      for (int d = 0; rest; d++, rest >>= 7) {
        e.word[d][e.count] = (rest & 127) << 8 * (places[o] % 4);
        e.digits = most<int8_t>(e.digits, (int8_t)(d + 1));
      }
      e.count++;
    }
    if (sign > 0) e.positive = e.count;
  }
}

// acc + the excess times its weights; `weights(column)` is the word of four columns of TILE channels that holds the column.
template <class F> static inline void add_excess(const Excess& e, vi* acc, F&& weights) {
  vi more[TV] = {}, less[TV] = {};
  for (int d = e.digits - 1; d >= 0; d--) {
    for (int i = 0; i < TV; i++) more[i] <<= 7, less[i] <<= 7;
    int o = 0;
    for (; o < e.positive; o++)
      for (int i = 0; i < TV; i++) more[i] = dot_digit(more[i], weights(e.place[o], i), e.word[d][o]);
    for (; o < e.count; o++)
      for (int i = 0; i < TV; i++) less[i] = dot_digit(less[i], weights(e.place[o], i), e.word[d][o]);
  }
  for (int i = 0; i < TV; i++) acc[i] += more[i] - less[i];
}

static inline void quantize_row(const Rows& r, int64_t m, const float* x, int64_t n, int64_t group, float* copy, float* tops) {
  int8_t* q = r.values + m * r.stride;
  std::memset(q + n, 0, r.stride - n);
  vf check{};
  int64_t i = 0;
  for (; i + VL <= n; i += VL) check += loadu<vf>(x + i) * 0.0f;
  float finite = sum_lanes(check);
  for (; i < n; i++) finite += x[i] * 0.0f;
  if (finite != 0) {  // a NaN or infinity makes the whole row NaN
    std::memset(q, 0, n);
    std::memset(r.sums + m * r.groups, 0, 4 * r.groups);
    r.scale[m] = finite;
    r.excess[m] = {};
    return;
  }
  float outliers[OUTLIERS];
  int32_t places[OUTLIERS];
  int count = (int)least<int64_t>(OUTLIERS, n);
  std::memcpy(copy, x, 4 * n);
  take_outliers(copy, n, tops, outliers, places, count);
  float scale = most(largest(copy, n) / 127.0f, fabsf(outliers[0]) / 2097152.0f);
  float inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
  r.scale[m] = scale > 1e-30f ? scale : 0.0f;
  note_excess(r.excess[m], outliers, places, count, inverse);
  for (i = 0; i + VL <= n; i += VL) {
    vi v = round_int(loadu<vf>(x + i) * inverse);
    v = v > 127 ? splat(127) : v;
    v = v < -127 ? splat(-127) : v;
    to_i8(q + i, v);
  }
  for (; i < n; i++) q[i] = (int8_t)least(most(round_int(splat(x[i] * inverse))[0], -127), 127);
  for (int64_t g = 0; g < r.groups; g++) {
    vi sum{};
    for (int64_t k = g * group; k < (g + 1) * group; k += VL) sum += from_i8(q + k);
    r.sums[m * r.groups + g] = sum_lanes(sum);
  }
}

// The caller's memory is its own thread's and lives until its next call; the pool's threads only read it.
static inline Rows quantize(const Weight& w, int64_t m, int64_t padded_m, const float* x) {
  static thread_local Buffer<int8_t> values;
  static thread_local Buffer<float> scale;
  static thread_local Buffer<int32_t> sums;
  static thread_local Buffer<Excess> excess;
  int64_t columns = padded_columns(w), group = w.kind == INT4 ? w.group : columns;
  Rows r;
  r.stride = columns + BLOCK;  // off the powers of two, so that rows do not fall into the same sets of the cache
  r.groups = columns / group;
  r.values = values.take(padded_m * r.stride);
  r.scale = scale.take(m);
  r.sums = sums.take(m * r.groups);
  r.excess = excess.take(m);
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
