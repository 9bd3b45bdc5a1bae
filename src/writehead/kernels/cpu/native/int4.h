// Products with int4 weights. Few rows read the halves as they are; for more, a panel becomes int8 weights first, which are
// the same integers: so is the sum.
#pragma once

#include "int8.h"

namespace ISA {

#if defined(__AVX512F__)
constexpr int MAX_ROWS_INT4 = 6;
constexpr int tiles_of_int4(int rows) { return rows <= 3 ? 4 : 2; }
#else
constexpr int MAX_ROWS_INT4 = 2;
constexpr int tiles_of_int4(int) { return 1; }
#endif

static inline vi low_halves(vi both) { return both & 0x0f0f0f0f; }
static inline vi high_halves(vi both) { return (vi)((vu)both >> 4) & 0x0f0f0f0f; }

static inline vi steps_of(const int8_t* group, int i) { return from_i8(group + i * VL); }
static inline vi offsets_of(const int8_t* group, int i) { return from_i8(group + TILE + i * VL); }

// What makes int8 weights of a group's halves: bytes b -> b * step + base, modulo 256.
struct Widen {
  typedef uint16_t vs __attribute__((vector_size(4 * VL)));
  typedef int8_t vq __attribute__((vector_size(4 * VL)));
  vs step;
  vq base;

  Widen(const int8_t* group, int i) {
    vi steps = steps_of(group, i);
    step = (vs)(steps * 0x00010001);
    base = (vq)(((offsets_of(group, i) - 8 * steps) & 0xff) * 0x01010101);
  }
  vi operator()(vi halves) const {
    vs even = (vs)halves * step, odd = ((vs)halves & 0xff00) * step;
    return (vi)((vq)((even & 0x00ff) | (odd & 0xff00)) + base);
  }
};

static void widen_tile(const Weight& w, int64_t tile, uint8_t* to) {
  const uint8_t* data = tile_at(w, tile);
  const int8_t* group = groups_of(w, tile);
  for (int64_t first = 0; first < padded_columns(w); first += w.group, group += 2 * TILE)
    for (int i = 0; i < TV; i++) {
      Widen widen(group, i);
      for (int64_t k = first; k < first + w.group; k += 8) {
        vi both = loadu<vi>(data + k * (TILE / 2) + 4 * VL * i);
        storeu(to + k * TILE + 4 * VL * i, widen(low_halves(both)));
        storeu(to + (k + 4) * TILE + 4 * VL * i, widen(high_halves(both)));
      }
    }
}

static inline void finish_int4(const Weight& w, const Rows& r, const Target& t, int64_t m, int64_t tile, vi* sums) {
  const uint8_t* data = tile_at(w, tile);
  const int8_t* groups = groups_of(w, tile);
  add_excess(r.excess[m], sums, [&](int64_t k, int i) {
    vi both = loadu<vi>(data + k / 8 * 64 + 4 * VL * i);
    return Widen(groups + k / w.group * 2 * TILE, i)(k / 4 % 2 ? high_halves(both) : low_halves(both));
  });
  finish_integer(channel_scales(w), r, t, m, tile, sums);
}

template <int MR, int NT>
static void block_int4(const Weight& w, const Rows& r, const Target& t, int64_t m, int64_t tile) {
  constexpr int NV = NT * TV;
  vi total[MR][NV] = {};
  const uint8_t* data[NT];
  const int8_t* groups[NT];
  for (int n = 0; n < NT; n++) data[n] = tile_at(w, tile + n), groups[n] = groups_of(w, tile + n);
  const int8_t* a = r.values + m * r.stride;
  for (int64_t g = 0; g < r.groups; g++) {
    vi acc[MR][NV];
    for (int i = 0; i < MR; i++)
      for (int j = 0; j < NV; j++) acc[i][j] = splat(-8 * r.sums[(m + i) * r.groups + g]);
    for (int64_t k = g * w.group; k < (g + 1) * w.group; k += 8) {
      vi low[NV], high[NV];
      for (int n = 0; n < NT; n++) {
        const uint8_t* p = data[n] + k * (TILE / 2);
        __builtin_prefetch(p + 2048);
        for (int i = 0; i < TV; i++) {
          vi both = loadu<vi>(p + 4 * VL * i);
          low[n * TV + i] = low_halves(both);
          high[n * TV + i] = high_halves(both);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        Values front = values_i8(a + i * r.stride + k), back = values_i8(a + i * r.stride + k + 4);
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) acc[i][j] = dot_u4(dot_u4(acc[i][j], low[j], front), high[j], back);
      }
    }
    for (int n = 0; n < NT; n++)
      for (int i = 0; i < TV; i++) {
        vi step = steps_of(groups[n] + g * 2 * TILE, i), offset = offsets_of(groups[n] + g * 2 * TILE, i);
        for (int row = 0; row < MR; row++)
          total[row][n * TV + i] += acc[row][n * TV + i] * step + offset * r.sums[(m + row) * r.groups + g];
      }
  }
  for (int i = 0; i < MR; i++)
    for (int n = 0; n < NT; n++) finish_int4(w, r, t, m + i, tile + n, &total[i][n * TV]);
}

template <int MR> static void rows_int4(const Weight& w, const Rows& r, const Target& t, int64_t m, int64_t first, int64_t last) {
  constexpr int NT = tiles_of_int4(MR);
  for (; first + NT <= last; first += NT) block_int4<MR, NT>(w, r, t, m, first);
  for (; first < last; first++) block_int4<MR, 1>(w, r, t, m, first);
}

}  // namespace ISA
