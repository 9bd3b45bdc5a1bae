// Matrix products with packed weights. What a row gives depends on that row alone: integer sums are exact in any order, and
// floating-point sums run over the columns in one order, whatever the number of rows, the blocking or the threads.

#include "floats.h"
#include "int4.h"
#include "int8.h"
#include "ops.h"
#if defined(WRITEHEAD_AMX)
#include "amx.h"
#endif

namespace ISA {

namespace {

constexpr int64_t PANEL = 2;  // tiles that stay in the cache while rows pass
[[maybe_unused]] constexpr int64_t ROWS_BYTES = 1 << 20;  // rows that stay in the cache while panels pass

// The weights after the tile `end`, to be fetched meanwhile.
Ahead next_panel(const Weight& w, int64_t end, int64_t last) {
  return {tile_at(w, end), end < last ? least(PANEL, last - end) * tile_bytes(w) : 0};
}

// All rows by the tiles first..last. `panel(first, last)` gives those tiles as int8.
template <class F> void many_rows([[maybe_unused]] const Weight& w, const Rows& r, const Target& t, int64_t m, int64_t first, int64_t last, F&& panel) {
#if defined(WRITEHEAD_AMX)
  Tiles configured;
  const int64_t fit = most<int64_t>(2, ROWS_BYTES / r.stride / 32) * 32, blocks = (m + fit - 1) / fit;
  const int64_t block = round_up((m + blocks - 1) / blocks, 32);
  for (int64_t start = 0; start < m; start += block)
    for (int64_t tile = first; tile < last; tile += PANEL) {
      int64_t end = least(tile + PANEL, last);
      tiles_int8(panel(tile, end), r, t, start, least(block, m - start), tile, end - tile == 2, next_panel(w, end, last));
    }
#else
  for (int64_t tile = first; tile < last; tile += PANEL) {
    int64_t end = least(tile + PANEL, last);
    vectors_int8(panel(tile, end), r, t, m, tile, end, next_panel(w, end, last));
  }
#endif
}

void linear_int8(const Weight& w, const Rows& r, const Target& t, int64_t m, int64_t first, int64_t last) {
  Panel all{(const uint8_t*)w.data, 0, padded_columns(w), channel_scales(w)};
  if (m <= FEW_ROWS) return few_int8(all, r, t, m, first, last);
  many_rows(w, r, t, m, first, last, [&](int64_t, int64_t) { return all; });
}

void linear_int4(const Weight& w, const Rows& r, const Target& t, int64_t m, int64_t first, int64_t last) {
  if (m <= MAX_ROWS_INT4) return with_rows<MAX_ROWS_INT4>((int)m, [&]<int R>() { rows_int4<R>(w, r, t, 0, first, last); });
  static thread_local Buffer<uint8_t> memory;
  const int64_t columns = padded_columns(w);
  uint8_t* wide = memory.take(PANEL * columns * TILE);
  many_rows(w, r, t, m, first, last, [&](int64_t from, int64_t to) {
    for (int64_t tile = from; tile < to; tile++) widen_tile(w, tile, wide + (tile - from) * columns * TILE);
    asm volatile("" ::: "memory");  // to the compiler, loads of tile registers read no memory
    return Panel{wide, from, columns, channel_scales(w)};
  });
}

}  // namespace

void linear(const Weight* w, int64_t m, const float* x, const float* bias, int32_t activation, const float* residual, float* y) {
  if (m == 0) return;  // a step that completes no prompt asks for no logits
  Target t{bias, residual, y, w->rows, activation};
  Rows r{};
  Floats f{};
  if (integer(*w)) r = quantize(*w, m, round_up(m, 16), x);
  else f = spread(*w, m, x);
  int64_t tiles = num_tiles(*w);
  int64_t work = m * w->rows * w->columns;
  pool::parallel((int)least<int64_t>(tiles, 1 + work / 65536), [&](int part, int parts) {
    int64_t pairs = (tiles + 1) / 2;
    int64_t first = 2 * (pairs * part / parts), last = least(tiles, 2 * (pairs * (part + 1) / parts));
    switch (w->kind) {
      case FP32: return linear_float<FP32>(*w, m, f, t, first, last);
      case BF16: return linear_float<BF16>(*w, m, f, t, first, last);
      case FP16: return linear_float<FP16>(*w, m, f, t, first, last);
      case INT8: return linear_int8(*w, r, t, m, first, last);
      case INT4: return linear_int4(*w, r, t, m, first, last);
    }
  });
}

}  // namespace ISA
