// Attention in fp32 vectors: any cache, any head size. A span is cut again into chunks that fit the first-level cache.
#pragma once

#include "attention_rows.h"

namespace ISA {

struct OnVectors {
  static constexpr int BLOCKS = 1;  // blocks of rows that take a span together

  template <int LG> static void read(Rows<LG>& r);
  template <int LG> static void span(const Rows<LG>* r, int count, int64_t from, int64_t to, State<LG>* s);
  template <int LG> static void write(const Rows<LG>& r, const State<LG>& s);
};

namespace {

constexpr int CHUNK = 64;
constexpr int KEYS = 8;  // keys whose scores are in registers at once

// n keys or values, from cache element `at` on, as fp32: where they are, or converted into `scratch`. Those of an int8 cache
// are still to be multiplied by their `scales`.
const float* as_float(const Attention& a, const void* cache, int64_t at, int64_t n, float* scratch, float* scales) {
  int64_t total = n * a.dim, i = 0;
  if (a.kind == FP32) return (const float*)cache + at;
  if (a.kind == INT8) {
    read_int8((const int8_t*)cache + at, n, a.dim, scratch, scales);
    return scratch;
  }
  const uint16_t* p = (const uint16_t*)cache + at;
  if (a.kind == BF16) {
    for (; i + VL <= total; i += VL) storeu(scratch + i, from_bf16(p + i));
    for (; i < total; i++) scratch[i] = bf16_to_float(p[i]);
  } else {
    for (; i + VL <= total; i += VL) storeu(scratch + i, from_half(p + i));
    for (; i < total; i++) scratch[i] = half_to_float(p[i]);
  }
  return scratch;
}

template <int LG> void score(const Rows<LG>& r, const float* keys, int n, vf (*scores)[LG]) {
  const int64_t dim = r.a->dim;
  constexpr int K = VL == 16 ? KEYS : KEYS / LG;
  for (int k = 0; k < n; k += K) {
    const float* at[K];
    for (int i = 0; i < K; i++) at[i] = keys + least(k + i, n - 1) * dim;
    vf s[K][LG] = {};
    for (int64_t d = 0; d < dim; d++)
#pragma GCC unroll 8
      for (int i = 0; i < K; i++)
#pragma GCC unroll 2
        for (int g = 0; g < LG; g++) s[i][g] = fma(r.q[d * LG + g], splat(at[i][d]), s[i][g]);
    for (int i = 0; i < K && k + i < n; i++)
      for (int g = 0; g < LG; g++) scores[k + i][g] = s[i][g];
  }
}

template <int LG> void multiply(vf (*x)[LG], const float* scales, int n) {
  for (int k = 0; k < n; k++)
    for (int g = 0; g < LG; g++) x[k][g] *= splat(scales[k]);
}

template <int LG> void mix(const float* values, int64_t dim, int n, const vf (*weights)[LG], vf* acc) {
  constexpr int D = VL == 16 ? KEYS : KEYS / LG;
  int64_t d = 0;
  for (; d + D <= dim; d += D) {
    vf s[D][LG] = {};
    for (int k = 0; k < n; k++)
#pragma GCC unroll 8
      for (int i = 0; i < D; i++)
#pragma GCC unroll 2
        for (int g = 0; g < LG; g++) s[i][g] = fma(weights[k][g], splat(values[k * dim + d + i]), s[i][g]);
    for (int i = 0; i < D; i++)
      for (int g = 0; g < LG; g++) acc[(d + i) * LG + g] = s[i][g];
  }
  for (; d < dim; d++)
    for (int g = 0; g < LG; g++) {
      vf s{};
      for (int k = 0; k < n; k++) s = fma(weights[k][g], splat(values[k * dim + d]), s);
      acc[d * LG + g] = s;
    }
}

}  // namespace

// [dim, LG] vectors.
template <int LG> void OnVectors::read(Rows<LG>& r) {
  float* lanes = (float*)r.q;
  for (int64_t i = 0; i < LG * VL; i++) {
    const float* from = r.query(r.lane_row(i));
    for (int64_t d = 0; d < r.a->dim; d++) lanes[d * LG * VL + i] = from[d] * r.a->scale;
  }
}

template <int LG> void OnVectors::span(const Rows<LG>* r, int, int64_t from, int64_t to, State<LG>* s) {
  static thread_local Buffer<vf> memory;
  const Attention& a = *r->a;
  const int64_t dim = a.dim;
  vf scores[CHUNK][LG];
  float scales[CHUNK];
  State<LG> one;
  one.acc = memory.take(dim * LG + CHUNK * dim / VL + 1);
  float* converted = (float*)(one.acc + dim * LG);
  s->clear(dim);
  for (int64_t first = from; first < to;) {
    int64_t last = least(to, (first / CHUNK + 1) * CHUNK);
    int n = (int)(last - first);
    score(*r, as_float(a, a.keys, r->slot(first), n, converted, scales), n, scores);
    if (a.kind == INT8) multiply(scores, scales, n);  // once for a key, not for each of its numbers
    finish_scores(*r, first, n, scores);
    for (int g = 0; g < LG; g++) {
      one.m[g] = splat(-1e30f);
      for (int k = 0; k < n; k++) one.m[g] = max(one.m[g], scores[k][g]);
      one.l[g] = vf{};
      for (int k = 0; k < n; k++) {
        scores[k][g] = exp(scores[k][g] - one.m[g]);
        one.l[g] += scores[k][g];
      }
    }
    const float* values = as_float(a, a.values, r->slot(first), n, converted, scales);
    if (a.kind == INT8) multiply(scores, scales, n);  // the weights, after their sum is taken
    mix<LG>(values, dim, n, scores, one.acc);
    merge(*s, one, dim);
    first = last;
  }
}

template <int LG> void OnVectors::write(const Rows<LG>& r, const State<LG>& s) {
  const float* acc = (const float*)s.acc;
  for (int64_t i = 0; i < r.count; i++) {
    float* to = r.out(r.first + i);
    float sum = s.l[i / VL][i % VL];
    for (int64_t d = 0; d < r.a->dim; d++) to[d] = acc[d * LG * VL + i] / sum;
  }
}

}  // namespace ISA
