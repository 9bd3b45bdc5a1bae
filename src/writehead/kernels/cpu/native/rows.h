// Rows of x as int8 under one scale each. The scale is that of the largest values but for eight, which may lie beyond 127
// steps: what they have more is `excess`, in digits to the base 128, and joins the same integer sum. Without that, one
// channel of a hundred times the others' size leaves the others two or three bits.
#pragma once

#include "packed.h"
#include "pool.h"
#include "simd.h"

namespace ISA {

constexpr int OUTLIERS = 8;
constexpr int DIGITS = 3;
constexpr float MOST_STEPS = 1048576.0f;  // of a value: 127 times eight of them and 65,528 values of 127 fits 31 bits

// What the outliers of a row have beyond 127 steps. Unused entries are zero.
struct Excess {
  int32_t digits, total;  // digits of the largest, from one; the sum of all
  int32_t place[OUTLIERS];  // column
  int32_t word[DIGITS][OUTLIERS];  // a signed digit, in the byte that its column has in a word of four; the lowest digit first
};

struct Rows {
  int8_t* values;  // [M, stride], zero beyond the columns
  int64_t stride;
  float* scale;  // [M]
  int32_t* sums;  // [M, groups]: the sum of each group's values
  int64_t groups;
  Excess* excess;  // [M]
};

// The first place whose absolute value is `top`, which is there.
static inline int64_t find(const float* x, int64_t n, float top) {
  int64_t i = 0;
  for (; i + VL <= n; i += VL)
    if (uint32_t found = lanes_of(abs(loadu<vf>(x + i)) == top)) return i + __builtin_ctz(found);
  while (fabsf(x[i]) != top) i++;
  return i;
}

// Finds the largest values of `x` [n], which it sets to zero; ties go to the first. `tops` are the largest of each block.
static inline void take_outliers(float* x, int64_t n, float* tops, float* outliers, int32_t* places, int count) {
  const int64_t blocks = (n + BLOCK - 1) / BLOCK;
  for (int o = 0; o < count; o++) {
    const float top = largest(tops, blocks);
    const int64_t b = find(tops, blocks, top), size = least<int64_t>(BLOCK, n - b * BLOCK);
    float* block = x + b * BLOCK;
    const int64_t i = find(block, size, top);
    outliers[o] = block[i];
    places[o] = (int32_t)(b * BLOCK + i);
    block[i] = 0;
    tops[b] = largest(block, size);
  }
}

static inline void note_excess(Excess& e, const float* outliers, const int32_t* places, int count, float inverse) {
  e = {};
  e.digits = 1;
  for (int o = 0; o < count; o++) {
    const int32_t steps = round_int(splat(outliers[o] * inverse))[0], sign = steps < 0 ? -1 : 1;
    int32_t rest = sign * steps - 127;
    if (rest <= 0) continue;
    e.place[o] = places[o];
    e.total += sign * rest;
    for (int d = 0; rest; d++, rest >>= 7) {
      e.word[d][o] = (int32_t)((uint32_t)(uint8_t)(sign * (rest & 127)) << 8 * (places[o] % 4));
      e.digits = most(e.digits, d + 1);
    }
  }
}

// acc + the excess times its weights; `weights(column, i)` is vector `i` of the words of four columns of TILE channels that
// hold the column. No branch on how many outliers there are: nobody could predict it.
template <class F> static inline void add_excess(const Excess& e, vi* acc, F&& weights) {
  for (int i = 0; i < TV; i++) acc[i] -= OFFSET * e.total;
#pragma GCC unroll 8
  for (int o = 0; o < OUTLIERS; o++) {
    const Values digit = values_i8(&e.word[0][o]);
    for (int i = 0; i < TV; i++) acc[i] = dot_i8(acc[i], weights_i8(weights(e.place[o], i)), digit);
  }
  for (int d = 1; d < e.digits; d++)
    for (int o = 0; o < OUTLIERS; o++) {
      const Values digit = values_i8(&e.word[d][o]);
      for (int i = 0; i < TV; i++) acc[i] += dot_i8(vi{}, weights_i8(weights(e.place[o], i)), digit) << 7 * d;
    }
}

// Copies x [n] and notes the largest of each block. Zero, or NaN if x holds a NaN or infinity.
static inline float survey(const float* x, int64_t n, float* copy, float* tops) {
  vf check{};
  float rest = 0;
  for (int64_t start = 0; start < n; start += BLOCK) {
    const int64_t end = least<int64_t>(start + BLOCK, n);
    vf m{};
    int64_t i = start;
    for (; i + VL <= end; i += VL) {
      vf v = loadu<vf>(x + i);
      storeu(copy + i, v);
      m = max(m, abs(v));
      check += v * 0.0f;
    }
    float top = max_lanes(m);
    for (; i < end; i++) {
      copy[i] = x[i];
      top = most(top, fabsf(x[i]));
      rest += x[i] * 0.0f;
    }
    tops[start / BLOCK] = top;
  }
  return sum_lanes(check) + rest;
}

static inline vi to_steps(vf x, float inverse) {
  vi v = round_int(x * inverse);
  v = v > 127 ? splat(127) : v;
  return v < -127 ? splat(-127) : v;
}

static inline void quantize_row(const Rows& r, int64_t m, const float* x, int64_t n, int64_t group, float* copy, float* tops) {
  int8_t* q = r.values + m * r.stride;
  std::memset(q + n, 0, r.stride - n);
  const float finite = survey(x, n, copy, tops);
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
  take_outliers(copy, n, tops, outliers, places, count);
  float scale = most(largest(tops, (n + BLOCK - 1) / BLOCK) / 127.0f, fabsf(outliers[0]) / MOST_STEPS);
  float inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
  r.scale[m] = scale > 1e-30f ? scale : 0.0f;
  note_excess(r.excess[m], outliers, places, count, inverse);
  for (int64_t g = 0; g < r.groups; g++) {
    const int64_t end = least(n, (g + 1) * group);
    vi sum{};
    int64_t i = g * group;
    for (; i + VL <= end; i += VL) {
      vi v = to_steps(loadu<vf>(x + i), inverse);
      to_i8(q + i, v);
      sum += v;
    }
    int32_t total = sum_lanes(sum);
    for (; i < end; i++) total += q[i] = (int8_t)to_steps(splat(x[i]), inverse)[0];
    r.sums[m * r.groups + g] = total;
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
