// Attention on tile registers (Intel AMX), over a bf16 cache whose head size is a multiple of 32. Queries and weights are
// rounded to bf16; sums, softmax and what joins the parts stay fp32.
//
// Rows lie in lanes as in vectors: scores [keys, rows] = K q^T take K from the cache as it is, and the mix [dim, rows] = V^T p
// takes weights as they come; V is transposed once for all blocks of rows that take a span together. A weight that is not
// seen is exactly zero, and a product with zero changes no sum, so blocks of keys that only some rows see may come or stay away.
#pragma once

#include "attention_rows.h"
#include "tiles.h"

namespace ISA {

struct OnTiles {
  static constexpr int BLOCKS = 8;

  static bool takes(const Attention& a) { return a.kind == BF16 && a.dim % 32 == 0; }
  template <int LG> static void read(Rows<LG>& r);
  template <int LG> static void span(const Rows<LG>* r, int count, int64_t from, int64_t to, State<LG>* s);
  template <int LG> static void write(const Rows<LG>& r, const State<LG>& s);
};

namespace {

constexpr int STEP = 32;  // keys of two tiles, and of one multiplication by weights

void to_bf16(uint16_t* to, vf x) {  // to the nearest, ties to even; NaN stays NaN
  vu bits = (vu)x, rounded = bits + 0x7fff + (bits >> 16 & 1);
  rounded = x == x ? rounded : bits | 0x400000;
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)(rounded >> 16)));
}

// 16 x 16 words; rows are `from_stride` and `to_stride` words apart.
void transpose_words(const void* from, int64_t from_stride, void* to, int64_t to_stride) {
  __m512i x[16], y[16];
  for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512((const float*)from + i * from_stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // x[i + j]: column j of each 4 x 4 part of rows i..i + 3
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    __m512i a = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88), b = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd);
    __m512i c = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88), d = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
    float* row = (float*)to + j * to_stride;
    _mm512_storeu_si512(row, _mm512_shuffle_i32x4(a, c, 0x88));
    _mm512_storeu_si512(row + 4 * to_stride, _mm512_shuffle_i32x4(b, d, 0x88));
    _mm512_storeu_si512(row + 8 * to_stride, _mm512_shuffle_i32x4(a, c, 0xdd));
    _mm512_storeu_si512(row + 12 * to_stride, _mm512_shuffle_i32x4(b, d, 0xdd));
  }
}

// [STEP keys, dim] to [dim, STEP keys], 8 values of dim at a time: lane i of 128 bits holds keys 8 i .. 8 i + 7.
void transpose_step(const uint16_t* from, int64_t dim, uint16_t* to) {
  for (int64_t d = 0; d < dim; d += 8) {
    __m512i x[8], y[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      const uint16_t* p = from + i * dim + d;
      x[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)p));
      x[i] = _mm512_inserti32x4(x[i], _mm_loadu_si128((const __m128i*)(p + 8 * dim)), 1);
      x[i] = _mm512_inserti32x4(x[i], _mm_loadu_si128((const __m128i*)(p + 16 * dim)), 2);
      x[i] = _mm512_inserti32x4(x[i], _mm_loadu_si128((const __m128i*)(p + 24 * dim)), 3);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      y[i] = _mm512_unpacklo_epi16(x[i], x[i + 1]);
      y[i + 1] = _mm512_unpackhi_epi16(x[i], x[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      x[i] = _mm512_unpacklo_epi32(y[i], y[i + 2]);
      x[i + 1] = _mm512_unpackhi_epi32(y[i], y[i + 2]);
      x[i + 2] = _mm512_unpacklo_epi32(y[i + 1], y[i + 3]);
      x[i + 3] = _mm512_unpackhi_epi32(y[i + 1], y[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      _mm512_storeu_si512(to + (d + 2 * i) * STEP, _mm512_unpacklo_epi64(x[i], x[i + 4]));
      _mm512_storeu_si512(to + (d + 2 * i + 1) * STEP, _mm512_unpackhi_epi64(x[i], x[i + 4]));
    }
  }
}

// STEP keys or values: where they are, or, if only `stored` of them exist, with zeros after them in `scratch`.
const uint16_t* whole_step(const uint16_t* from, int64_t stored, int64_t dim, uint16_t* scratch) {
  if (stored >= STEP) return from;
  std::memcpy(scratch, from, 2 * stored * dim);
  std::memset(scratch + stored * dim, 0, 2 * (STEP - stored) * dim);
  return scratch;
}

// Scores of STEP keys [STEP, dim]; q [LG, dim / 2, 16 rows, 2].
template <int LG> void tile_scores(const uint16_t* keys, const uint16_t* q, int64_t dim, vf (*scores)[LG]) {
  asm volatile("" ::: "memory");
  _tile_zero(0);
  _tile_zero(1);
  if (LG == 2) _tile_zero(2);
  if (LG == 2) _tile_zero(3);
  for (int64_t d = 0; d < dim; d += 32) {
    _tile_loadd(4, keys + d, 2 * dim);
    _tile_loadd(6, q + d * 16, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, keys + 16 * dim + d, 2 * dim);
    _tile_dpbf16ps(1, 5, 6);
    if (LG == 1) continue;
    _tile_loadd(7, q + (dim + d) * 16, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, &scores[0][0], 64 * LG);
  _tile_stored(1, &scores[16][0], 64 * LG);
  if (LG == 2) _tile_stored(2, &scores[0][LG - 1], 64 * LG);
  if (LG == 2) _tile_stored(3, &scores[16][LG - 1], 64 * LG);
}

// acc [dim, LG] = values [steps, dim, STEP] times weights [LG, SPAN / 2, 16 rows, 2].
template <int LG> void tile_mix(const uint16_t* values, const vu (*weights)[SPAN / 2], int64_t steps, int64_t dim, vf* acc) {
  asm volatile("" ::: "memory");
  for (int64_t d = 0; d < dim; d += 32) {
    _tile_zero(0);
    _tile_zero(1);
    if (LG == 2) _tile_zero(2);
    if (LG == 2) _tile_zero(3);
    for (int64_t s = 0; s < steps; s++) {
      const uint16_t* v = values + (s * dim + d) * STEP;
      _tile_loadd(4, v, 64);
      _tile_loadd(6, weights[0] + s * 16, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, v + 16 * STEP, 64);
      _tile_dpbf16ps(1, 5, 6);
      if (LG == 1) continue;
      _tile_loadd(7, weights[LG - 1] + s * 16, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, acc + d * LG, 64 * LG);
    _tile_stored(1, acc + (d + 16) * LG, 64 * LG);
    if (LG == 2) _tile_stored(2, acc + d * LG + 1, 64 * LG);
    if (LG == 2) _tile_stored(3, acc + (d + 16) * LG + 1, 64 * LG);
  }
}

// e^(x - m) for x <= m to 1 part in 10,000, a fifth of what rounding to bf16 does; 0 for -infinity.
vf weight(vf x, vf scaled_m) {
  vf y = max(splat(-200.0f), fma(x, splat(1.44269504088896341f), scaled_m));
  vf t = y + 12582912.0f;  // rounds to an integer, as in round_int
  vf n = t - 12582912.0f, r = y - n;
  vf p = fma(fma(fma(splat(0.05500893f), r, splat(0.242211f)), r, splat(0.69328293f)), r, splat(1.0f));
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
}

// Scores of n keys to weights in bf16, pairs of keys in a word. Their sum is of the rounded weights, which are what multiplies
// the values: a mix of equal values is that value.
template <int LG> void tile_softmax(const vf (*scores)[LG], int64_t n, State<LG>& s, vu (*weights)[SPAN / 2]) {
  for (int g = 0; g < LG; g++) {
    vf m[4];
    for (int i = 0; i < 4; i++) m[i] = splat(-1e30f);
    for (int64_t k = 0; k < n; k += 4)
      for (int i = 0; i < 4; i++) m[i] = max(m[i], scores[k + i][g]);
    s.m[g] = max(max(m[0], m[1]), max(m[2], m[3]));
    const vf scaled = s.m[g] * -1.44269504088896341f;
    vf sum{};
    for (int64_t k = 0; k < n; k += 2) {
      vu even = ((vu)weight(scores[k][g], scaled) + 0x8000) & 0xffff0000;  // not negative: half a unit more, then cut
      vu odd = ((vu)weight(scores[k + 1][g], scaled) + 0x8000) & 0xffff0000;
      sum += (vf)even;
      sum += (vf)odd;
      weights[g][k / 2] = even >> 16 | odd;
    }
    s.l[g] = sum;
  }
}

}  // namespace

// bf16 [LG, dim / 2, 16 rows, 2].
template <int LG> void OnTiles::read(Rows<LG>& r) {
  static thread_local Buffer<uint16_t> memory;
  const int64_t dim = r.a->dim;
  uint16_t *rows = memory.take(16 * dim), *to = (uint16_t*)r.q;
  for (int g = 0; g < LG; g++, to += 16 * dim) {
    for (int i = 0; i < 16; i++) {
      const float* from = r.query(r.lane_row(g * 16 + i));
      for (int64_t d = 0; d < dim; d += VL) to_bf16(rows + i * dim + d, loadu<vf>(from + d) * r.a->scale);
    }
    for (int64_t d = 0; d < dim; d += 32) transpose_words(rows + d, dim / 2, to + d * 16, 16);
  }
}

template <int LG> void OnTiles::span(const Rows<LG>* r, int count, int64_t from, int64_t to, State<LG>* s) {
  static thread_local Buffer<uint16_t> memory;
  const int64_t dim = r->a->dim, start = from / STEP * STEP, stored = r->a->length[r->sequence] - start;
  const uint16_t *keys = (const uint16_t*)r->a->keys + r->slot(start), *values = (const uint16_t*)r->a->values + r->slot(start);
  uint16_t *mixed = memory.take((SPAN + STEP) * dim), *scratch = mixed + SPAN * dim;
  alignas(64) vf scores[SPAN][LG];
  alignas(64) vu weights[LG][SPAN / 2];
  Tiles configured;
  for (int64_t k = 0; k < to - start; k += STEP)
    transpose_step(whole_step(values + k * dim, stored - k, dim, scratch), dim, mixed + k * dim);
  for (int i = 0; i < count; i++) {
    const int64_t n = least(to, r[i].end()) - start, steps = most<int64_t>(1, (n + STEP - 1) / STEP);
    for (int64_t k = 0; k < steps * STEP; k += STEP)
      tile_scores(whole_step(keys + k * dim, stored - k, dim, scratch), (const uint16_t*)r[i].q, dim, scores + k);
    finish_scores(r[i], start, n, scores);
    for (int64_t k = most<int64_t>(0, n); k < steps * STEP; k++)
      for (int g = 0; g < LG; g++) scores[k][g] = splat(-__builtin_inff());
    tile_softmax(scores, steps * STEP, s[i], weights);
    tile_mix<LG>(mixed, weights, steps, dim, s[i].acc);
  }
}

template <int LG> void OnTiles::write(const Rows<LG>& r, const State<LG>& s) {
  static thread_local Buffer<float> memory;
  const int64_t dim = r.a->dim;
  float* rows = memory.take(16 * dim);
  for (int64_t g = 0; g * 16 < r.count; g++) {
    for (int64_t d = 0; d < dim; d += 16) transpose_words(s.acc + d * LG + g, 16 * LG, rows + d, dim);
    const vf inverse = 1.0f / s.l[g];
    for (int64_t i = 0; i < least<int64_t>(16, r.count - g * 16); i++) {
      float* to = r.out(r.first + g * 16 + i);
      for (int64_t d = 0; d < dim; d += VL) storeu(to + d, loadu<vf>(rows + i * dim + d) * inverse[i]);
    }
  }
}

}  // namespace ISA
