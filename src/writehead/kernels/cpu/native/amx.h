// int8 products on tile registers (Intel AMX): 32 rows by 32 channels at once. The packed weight is already in their layout.
// The integer sums are those of the vector code, so which of the two ran cannot be seen in a result.
#pragma once

#include "int8.h"
#include "tiles.h"

namespace ISA {

// Up to 32 rows from m on, by the tiles `tile` and `tile + 1` or the first alone.
template <bool TWO_ROWS, bool TWO_TILES>
static void amx_block(const Panel& p, const Rows& r, const Target& t, int64_t m, int64_t rows, int64_t tile, Ahead ahead) {
  alignas(64) int32_t sums[4][16][TILE];
  const uint8_t* b0 = p.at(tile);
  const uint8_t* b1 = p.at(tile + (TWO_TILES ? 1 : 0));
  const int8_t* a0 = r.values + m * r.stride;
  const int8_t* a1 = a0 + 16 * r.stride;
  _tile_zero(0);
  if (TWO_TILES) _tile_zero(1);
  if (TWO_ROWS) _tile_zero(2);
  if (TWO_ROWS && TWO_TILES) _tile_zero(3);
  Fetch fetch(ahead, p.columns);
  for (int64_t k = 0; k < p.columns; k += 64) {
    fetch.next();
    _tile_loadd(4, a0 + k, r.stride);
    _tile_loadd(6, b0 + k * TILE, 64);
    _tile_dpbssd(0, 4, 6);
    if (TWO_TILES) {
      _tile_loadd(7, b1 + k * TILE, 64);
      _tile_dpbssd(1, 4, 7);
    }
    if (TWO_ROWS) {
      _tile_loadd(5, a1 + k, r.stride);
      _tile_dpbssd(2, 5, 6);
      if (TWO_TILES) _tile_dpbssd(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0], 64);
  if (TWO_TILES) _tile_stored(1, sums[1], 64);
  if (TWO_ROWS) _tile_stored(2, sums[2], 64);
  if (TWO_ROWS && TWO_TILES) _tile_stored(3, sums[3], 64);
  for (int64_t i = 0; i < rows; i++)
    for (int n = 0; n < (TWO_TILES ? 2 : 1); n++) {
      vi acc = loadu<vi>(sums[i / 16 * 2 + n][i % 16]);
      finish_int8(p, r, t, m + i, tile + n, &acc);
    }
}

// Rows start.. (`count` of them) by the panel's tiles `tile` and, if `two`, the next. Tile registers are configured.
static void tiles_int8(const Panel& p, const Rows& r, const Target& t, int64_t start, int64_t count, int64_t tile, bool two, Ahead ahead) {
  const int64_t blocks = (count + 31) / 32;
  for (int64_t b = 0; b < blocks; b++) {
    int64_t row = start + 32 * b, rows = least<int64_t>(32, start + count - row);
    Ahead some = ahead.part(b, b + 1, blocks);
    if (rows > 16) two ? amx_block<true, true>(p, r, t, row, rows, tile, some) : amx_block<true, false>(p, r, t, row, rows, tile, some);
    else two ? amx_block<false, true>(p, r, t, row, rows, tile, some) : amx_block<false, false>(p, r, t, row, rows, tile, some);
  }
}

}  // namespace ISA
