// Products with int8 weights.
#pragma once

#include "rows.h"
#include "target.h"

namespace ISA {

#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;
constexpr int FEW_ROWS = 6;  // that pass the weights once; more take a panel, while the next one is fetched
constexpr int FEW_TILES = 4;  // streams of weights: one alone reads a fifth less from memory
constexpr int PANEL_TILES = 2;
constexpr int unroll_of(int rows) { return rows <= 2 ? 2 : 1; }
#else
constexpr int MAX_ROWS = TV == 2 ? 5 : 4;
constexpr int FEW_ROWS = MAX_ROWS;
constexpr int FEW_TILES = 1;
constexpr int PANEL_TILES = 1;
constexpr int unroll_of(int rows) { return rows == 1 ? 2 : 1; }
#endif

// Tiles of int8 weights side by side: those of a packed weight, or some made of another one's.
struct Panel {
  const uint8_t* data;  // of the tile `first`
  int64_t first, columns;
  const float* scales;  // of all channels of the weight

  const uint8_t* at(int64_t tile) const { return data + (tile - first) * columns * TILE; }
};

// Memory to be fetched while a product runs: the next weights.
struct Ahead {
  const uint8_t* data = nullptr;
  int64_t bytes = 0;

  // Parts from..to of n.
  Ahead part(int64_t from, int64_t to, int64_t n) const { return {data + bytes * from / n, bytes * to / n - bytes * from / n}; }
};

// Fetches it step by step, a step for each BLOCK of the product's columns. From several places at once: each wakes the
// processor's own prefetcher, which has more room than the instruction.
class Fetch {
 public:
  Fetch(Ahead ahead, int64_t columns)
      : at(ahead.data), apart(round_up(ahead.bytes / PLACES, 64)), end(at + apart), step(round_up(apart * BLOCK / columns, 64)) {}

  void next() {
    for (const uint8_t* to = least(at + step, end); at < to; at += 64)
      for (int i = 0; i < PLACES; i++) __builtin_prefetch(at + i * apart, 0, 2);
  }

 private:
  static constexpr int PLACES = 4;
  const uint8_t* at;
  int64_t apart;
  const uint8_t* end;
  int64_t step;
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

// sums [MR, NT * TV] = MR rows of x, `stride` bytes apart, by NT tiles of `columns` inputs, which STREAM from memory or stay in
// the cache for other rows. A function of its own and few arguments: the accumulators leave no register to spare.
template <int MR, int NT, int KU, bool STREAM>
__attribute__((noinline)) static void dots(const uint8_t* weights, int64_t columns, const int8_t* x, int64_t stride, Ahead ahead, vi (*sums)[NT * TV]) {
  vi acc[KU][MR][NT * TV] = {};
  Fetch fetch(ahead, columns);
  for (int64_t block = 0; block < columns; block += BLOCK) {
    fetch.next();
    for (int64_t k = block; k < block + BLOCK; k += 4 * KU)
#pragma GCC unroll 8
      for (int u = 0; u < KU; u++) {
        Weights wv[NT * TV];
        for (int n = 0; n < NT; n++) {
          const uint8_t* from = weights + (n * columns + k + 4 * u) * TILE;
          if (STREAM) __builtin_prefetch(from + 2048);
          for (int i = 0; i < TV; i++) wv[n * TV + i] = weights_i8(loadu<vi>(from + 4 * VL * i));
        }
#pragma GCC unroll 12
        for (int i = 0; i < MR; i++) {
          Values av = values_i8(x + i * stride + k + 4 * u);
#pragma GCC unroll 8
          for (int j = 0; j < NT * TV; j++) acc[u][i][j] = dot_i8(acc[u][i][j], wv[j], av);
        }
      }
  }
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NT * TV; j++) {
      for (int u = 1; u < KU; u++) acc[0][i][j] += acc[u][i][j];
      sums[i][j] = acc[0][i][j];
    }
}

template <int MR, int NT, int KU, bool STREAM>
static void block_int8(const Panel& p, const Rows& r, const Target& t, int64_t m, int64_t tile, Ahead ahead) {
  vi sums[MR][NT * TV];
  dots<MR, NT, KU, STREAM>(p.at(tile), p.columns, r.values + m * r.stride, r.stride, ahead, sums);
  for (int i = 0; i < MR; i++) {
    int32_t sum = 0;  // of all values of the row
    if (OFFSET)
      for (int64_t g = 0; g < r.groups; g++) sum += r.sums[(m + i) * r.groups + g];
    for (int j = 0; j < NT * TV; j++) sums[i][j] -= OFFSET * sum;
    for (int n = 0; n < NT; n++) finish_int8(p, r, t, m + i, tile + n, &sums[i][n * TV]);
  }
}

template <int MR, int NT, bool STREAM>
static void rows_int8(const Panel& p, const Rows& r, const Target& t, int64_t m, int64_t first, int64_t last, Ahead ahead) {
  constexpr int KU = unroll_of(MR);
  for (; first + NT <= last; first += NT) block_int8<MR, NT, KU, STREAM>(p, r, t, m, first, ahead);
  for (; first < last; first++) block_int8<MR, 1, KU, STREAM>(p, r, t, m, first, ahead);
}

// Up to FEW_ROWS rows by the tiles first..last.
static void few_int8(const Panel& p, const Rows& r, const Target& t, int64_t m, int64_t first, int64_t last) {
  with_rows<FEW_ROWS>((int)m, [&]<int R>() { rows_int8<R, FEW_TILES, true>(p, r, t, 0, first, last, {}); });
}

// Any rows by a panel's tiles first..last; `ahead` is fetched meanwhile.
static void vectors_int8(const Panel& p, const Rows& r, const Target& t, int64_t m, int64_t first, int64_t last, Ahead ahead) {
  cover<MAX_ROWS>(m, first, last, last - first, [&]<int R>(int64_t start, int64_t from, int64_t to) {
    rows_int8<R, PANEL_TILES, false>(p, r, t, start, from, to, ahead.part(start, start + R, m));
  });
}

}  // namespace ISA
