// Tile registers (Intel AMX), configured while an object of this type lives: 16 rows of 64 bytes each.
//
// To the compiler, loads of tile registers read no memory: after plain stores to what they load, `asm volatile("" ::: "memory")`.
#pragma once

#include "simd.h"

namespace ISA {

struct TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

struct Tiles {
  Tiles() {
    alignas(64) static const TileConfig config;  // not on the stack: to the compiler the instruction reads only 8 bytes of it
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};

}  // namespace ISA
