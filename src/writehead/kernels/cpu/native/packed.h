// Where the parts of a packed weight are; ops.h says what they hold.
#pragma once

#include "ops.h"
#include "simd.h"

namespace ISA {

constexpr int BLOCK = 64;  // columns of an integer weight come in whole blocks

static inline int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
static inline int64_t num_tiles(const Weight& w) { return round_up(w.rows, TILE) / TILE; }
static inline bool integer(const Weight& w) { return w.kind >= INT8; }
static inline int64_t padded_columns(const Weight& w) {
  return integer(w) ? round_up(w.columns, most<int64_t>(BLOCK, w.group)) : w.columns;
}
static inline int64_t tile_bytes(const Weight& w) {
  int64_t values = padded_columns(w) * TILE;
  return w.kind == FP32 ? 4 * values : w.kind <= FP16 ? 2 * values : w.kind == INT8 ? values : values / 2;
}
static inline int64_t data_bytes(const Weight& w) { return num_tiles(w) * tile_bytes(w); }
static inline uint8_t* tile_at(const Weight& w, int64_t tile) { return (uint8_t*)w.data + tile * tile_bytes(w); }
static inline int64_t group_bytes(const Weight& w) {  // a step and an offset for each group of each channel
  return w.kind == INT4 ? num_tiles(w) * TILE * 2 * (padded_columns(w) / w.group) : 0;
}
static inline int8_t* groups_of(const Weight& w, int64_t tile) {
  return (int8_t*)w.data + data_bytes(w) + tile * (padded_columns(w) / w.group) * 2 * TILE;
}
static inline float* channel_scales(const Weight& w) { return (float*)((uint8_t*)w.data + data_bytes(w) + group_bytes(w)); }
static inline int64_t size_of(const Weight& w) {
  return data_bytes(w) + group_bytes(w) + (integer(w) ? 4 * num_tiles(w) * TILE : 0);
}

}  // namespace ISA
