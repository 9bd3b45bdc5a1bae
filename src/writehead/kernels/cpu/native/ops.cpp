// Everything of a decoder that is neither a product nor attention.

#include "ops.h"
#include "packed.h"
#include "pool.h"
#include "simd.h"
#include "slots.h"

namespace ISA {

void linear(const Weight* w, int64_t m, const float* x, const float* bias, int32_t activation, const float* residual, float* y);
void attention(const Attention* a);

namespace {

// Work is worth a second thread from so many elements on.
int parts_of(int64_t elements) { return (int)least<int64_t>(pool::size(), 1 + elements / 16384); }

// ---- packing ----------------------------------------------------------------------------------------------------------

// Rows of the source as fp32, side by side; rows beyond it are zero.
void read_rows(const Weight& w, const void* source, int32_t kind, int64_t stride, int64_t first, float* to) {
  for (int64_t i = 0; i < TILE; i++, to += w.columns) {
    if (first + i >= w.rows) {
      std::memset(to, 0, 4 * w.columns);
      continue;
    }
    int64_t at = (first + i) * stride, k = 0;
    if (kind == FP32) {
      std::memcpy(to, (const float*)source + at, 4 * w.columns);
      continue;
    }
    const uint16_t* half = (const uint16_t*)source + at;
    for (; k + VL <= w.columns; k += VL) storeu(to + k, kind == BF16 ? from_bf16(half + k) : from_half(half + k));
    for (; k < w.columns; k++) to[k] = kind == BF16 ? bf16_to_float(half[k]) : half_to_float(half[k]);
  }
}

void pack_float(const Weight& w, const float* rows, int64_t tile) {
  for (int64_t k = 0; k < w.columns; k++)
    for (int i = 0; i < TILE; i++) {
      int64_t at = (tile * w.columns + k) * TILE + i;
      float x = rows[i * w.columns + k];
      if (w.kind == FP32) ((float*)w.data)[at] = x;
      else ((uint16_t*)w.data)[at] = w.kind == BF16 ? float_to_bf16(x) : float_to_half(x);
    }
}

int rounded(float x, float low, float high) { return (int)least(most(nearbyintf(x), low), high); }

void pack_int8(const Weight& w, const float* rows, int64_t tile) {
  int8_t* to = (int8_t*)tile_at(w, tile);
  std::memset(to, 0, tile_bytes(w));
  for (int i = 0; i < TILE; i++) {
    const float* row = rows + i * w.columns;
    float top = largest(row, w.columns);
    float inverse = top > 0 ? 127 / top : 0;
    channel_scales(w)[tile * TILE + i] = top / 127;
    for (int64_t k = 0; k < w.columns; k++) to[k / 4 * 64 + i * 4 + k % 4] = (int8_t)rounded(row[k] * inverse, -127, 127);
  }
}

// The smaller and larger of integers.
vi least_of(vi a, vi b) { return a < b ? a : b; }
vi most_of(vi a, vi b) { return a > b ? a : b; }
int32_t least_lane(vi x) {
  int32_t m = x[0];
  for (int i = 1; i < VL; i++) m = least(m, x[i]);
  return m;
}

int nearest(float x) { return (int)nearbyintf(x); }

// int4 weights of a group: (half) * step + offset, each half from -8 to 7.
struct Int4Group {
  int32_t error, step, offset;
  vi halves[128 / VL];
};

// The best offset for a step, from the middle of the range on: halves for that offset, then the offset for those halves. `x`
// are `n` values in sixteenths of an int8 weight. All decisions are taken on integers, so every instruction set takes the same.
void fit_int4(const vi* x, int n, int32_t step, int32_t middle, Int4Group& best) {
  const int vectors = n / VL;
  int32_t offset = least(most(middle, -127), 127);
  const float inverse = 1.0f / (float)(16 * step);
  vi halves[128 / VL];
  for (int round = 0; round < 2; round++) {
    const int32_t low = most(-8, -((127 + offset) / step)), high = least(7, (127 - offset) / step);
    vi errors{}, sums{};
    for (int v = 0; v < vectors; v++) {
      vi half = round_int(to_float(x[v] - 16 * offset) * inverse);
      halves[v] = half = most_of(least_of(half, splat(high)), splat(low));
      vi rest = x[v] - 16 * step * half, error = rest - 16 * offset;
      errors += error * error;
      sums += rest;
    }
    int32_t error = sum_lanes(errors);
    if (best.step == 0 || error < best.error) {
      best.error = error, best.step = step, best.offset = offset;
      std::memcpy(best.halves, halves, sizeof halves);
    }
    offset = least(most(nearest((float)sum_lanes(sums) * (1.0f / (float)(16 * n))), -127), 127);
  }
}

// int8 weights that are steps apart: the step that covers a group's range, or one less that cuts its ends.
void pack_int4(const Weight& w, const float* rows, int64_t tile) {
  static thread_local Buffer<vi> memory;
  const int64_t columns = padded_columns(w);
  const int n = w.group, vectors = n / VL;
  vi* x = memory.take(columns / VL);
  uint8_t* to = tile_at(w, tile);
  int8_t* group = groups_of(w, tile);
  std::memset(to, 0, tile_bytes(w));
  for (int i = 0; i < TILE; i++) {
    const float* row = rows + i * w.columns;
    const float top = largest(row, w.columns), inverse = top > 1e-30f ? 2032.0f / top : 0.0f;
    channel_scales(w)[tile * TILE + i] = top > 1e-30f ? top / 127.0f : 0.0f;
    std::memset((void*)x, 0, 4 * columns);
    int64_t k = 0;
    for (; k + VL <= w.columns; k += VL) x[k / VL] = round_int(loadu<vf>(row + k) * inverse);
    for (; k < w.columns; k++) x[k / VL][k % VL] = round_int(splat(row[k] * inverse))[0];
    for (int64_t g = 0; g < columns / n; g++) {
      const vi* some = x + g * vectors;
      vi low = some[0], negative_high = -some[0];
      for (int v = 1; v < vectors; v++) low = least_of(low, some[v]), negative_high = least_of(negative_high, -some[v]);
      const int32_t least_x = least_lane(low), most_x = -least_lane(negative_high), covering = most((most_x - least_x + 239) / 240, 1);
      Int4Group best{};
      for (int32_t step = covering; step >= most(covering - 1, 1); step--)
        fit_int4(some, n, step, nearest((float)(least_x + most_x + 16 * step) / 32.0f), best);
      group[g * 2 * TILE + i] = (int8_t)best.step, group[g * 2 * TILE + TILE + i] = (int8_t)best.offset;
      for (int j = 0; j < n; j++) {
        int64_t at = g * n + j;
        to[at / 8 * 64 + i * 4 + at % 4] |= (uint8_t)((best.halves[j / VL][j % VL] + 8) << (at / 4 % 2 * 4));
      }
    }
  }
}

void pack(const Weight* w, const void* source, int32_t source_kind, int64_t stride) {
  pool::parallel(parts_of(w->rows * w->columns), [&](int part, int parts) {
    static thread_local Buffer<float> buffer;
    float* rows = buffer.take(TILE * w->columns);
    for (int64_t tile = num_tiles(*w) * part / parts; tile < num_tiles(*w) * (part + 1) / parts; tile++) {
      read_rows(*w, source, source_kind, stride, tile * TILE, rows);
      if (w->kind == INT4) pack_int4(*w, rows, tile);
      else if (w->kind == INT8) pack_int8(*w, rows, tile);
      else pack_float(*w, rows, tile);
    }
  });
}

float unpacked(const Weight& w, int64_t row, int64_t k) {
  int64_t tile = row / TILE, i = row % TILE, at = (tile * w.columns + k) * TILE + i;
  switch (w.kind) {
    case FP32: return ((const float*)w.data)[at];
    case BF16: return bf16_to_float(((const uint16_t*)w.data)[at]);
    case FP16: return half_to_float(((const uint16_t*)w.data)[at]);
    case INT8: return ((const int8_t*)tile_at(w, tile))[k / 4 * 64 + i * 4 + k % 4] * channel_scales(w)[row];
  }
  uint8_t byte = tile_at(w, tile)[k / 8 * 64 + i * 4 + k % 4];
  const int8_t* group = groups_of(w, tile) + k / w.group * 2 * TILE + i;
  return (((k / 4 % 2 ? byte >> 4 : byte & 15) - 8) * group[0] + group[TILE]) * channel_scales(w)[row];
}

int32_t embed(const Weight* w, int64_t count, const int64_t* ids, float* y) {
  for (int64_t i = 0; i < count; i++)
    if (ids[i] < 0 || ids[i] >= w->rows) return 0;
  pool::parallel(parts_of(count * w->columns / 8), [&](int part, int parts) {
    for (int64_t i = count * part / parts; i < count * (part + 1) / parts; i++)
      for (int64_t k = 0; k < w->columns; k++) y[i * w->columns + k] = unpacked(*w, ids[i], k);
  });
  return 1;
}

// ---- norms, activations, rotary embedding -----------------------------------------------------------------------------

// The sum of f over [0, n), by lanes, then the rest: one order for one size.
template <class F> float sum_of(const float* x, int64_t n, F f) {
  vf s[4] = {};
  int64_t i = 0;
  for (; i + 4 * VL <= n; i += 4 * VL)
    for (int j = 0; j < 4; j++) s[j] += f(loadu<vf>(x + i + j * VL));
  float total = sum_lanes((s[0] + s[1]) + (s[2] + s[3]));
  for (; i < n; i++) total += f(splat(x[i]))[0];
  return total;
}

void norm_row(int rms, int64_t n, const float* x, const float* weight, const float* bias, float eps, float offset, float* y) {
  float mean = rms ? 0.0f : sum_of(x, n, [](vf v) { return v; }) / n;
  float square = sum_of(x, n, [=](vf v) { return (v - mean) * (v - mean); }) / n;
  float inverse = 1.0f / sqrtf(square + eps);
  int64_t i = 0;
  for (; i + VL <= n; i += VL) {
    vf v = (loadu<vf>(x + i) - mean) * inverse * (loadu<vf>(weight + i) + offset);
    storeu(y + i, bias ? v + loadu<vf>(bias + i) : v);
  }
  for (; i < n; i++) y[i] = (x[i] - mean) * inverse * (weight[i] + offset) + (bias ? bias[i] : 0.0f);
}

void norm(const Norm& a) {
  const int64_t rows = a.tokens * a.heads;
  pool::parallel(parts_of(rows * a.size / 4), [&](int part, int parts) {
    for (int64_t i = rows * part / parts; i < rows * (part + 1) / parts; i++)
      norm_row(a.rms, a.size, a.x + i / a.heads * a.stride + i % a.heads * a.size, a.weight, a.bias, a.eps, a.offset, a.y + i * a.size);
  });
}

void activate(int32_t kind, int32_t gated, int64_t m, int64_t size, const float* x, float* y) {
  pool::parallel(parts_of(m * size), [&](int part, int parts) {
    // Parts are whole vectors of the [M, size] outputs taken row by row, so that one row may be shared.
    for (int64_t row = 0; row < m; row++) {
      const float *gate = x + row * size * (gated ? 2 : 1), *up = gate + size;
      float* to = y + row * size;
      int64_t vectors = (size + VL - 1) / VL;
      if (m > 1 && row % parts != part) continue;
      int64_t first = m > 1 ? 0 : vectors * part / parts * VL, last = m > 1 ? size : least(size, vectors * (part + 1) / parts * VL);
      int64_t i = first;
      for (; i + VL <= last; i += VL) {
        vf v = activation(loadu<vf>(gate + i), kind);
        storeu(to + i, gated ? v * loadu<vf>(up + i) : v);
      }
      for (; i < last; i++) to[i] = activation(splat(gate[i]), kind)[0] * (gated ? up[i] : 1.0f);
    }
  });
}

void rotate(int64_t tokens, int64_t heads, int64_t dim, int64_t stride, int64_t half, const float* x, const float* cos, const float* sin, float* y) {
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t h = 0; h < heads; h++) {
      const float *from = x + t * stride + h * dim, *c = cos + t * half, *s = sin + t * half;
      float* to = y + (t * heads + h) * dim;
      int64_t i = 0;
      for (; i + VL <= half; i += VL) {
        vf a = loadu<vf>(from + i), b = loadu<vf>(from + half + i), cv = loadu<vf>(c + i), sv = loadu<vf>(s + i);
        storeu(to + i, a * cv - b * sv);
        storeu(to + half + i, b * cv + a * sv);
      }
      for (; i < half; i++) {
        float a = from[i], b = from[half + i];
        to[i] = a * c[i] - b * s[i];
        to[half + i] = b * c[i] + a * s[i];
      }
      std::memcpy(to + 2 * half, from + 2 * half, 4 * (dim - 2 * half));
    }
}

void store_head(const float* from, int64_t dim, int32_t kind, void* cache, int64_t at) {
  if (kind == FP32) {
    std::memcpy((float*)cache + at, from, 4 * dim);
    return;
  }
  if (kind == INT8) return write_int8(from, dim, (int8_t*)cache + at);
  uint16_t* to = (uint16_t*)cache + at;
  for (int64_t d = 0; d < dim; d++) to[d] = kind == BF16 ? float_to_bf16(from[d]) : float_to_half(from[d]);
}

void store(const Store& a) {
  for (int64_t t = 0; t < a.tokens; t++)
    for (int64_t h = 0; h < a.kv_heads; h++) {
      int64_t at = ((a.rows[t] * a.kv_heads + h) * a.capacity + a.slots[t]) * slot_size(a.kind, a.dim);
      store_head(a.k + t * a.k_stride + h * a.dim, a.dim, a.kind, a.keys, at);
      store_head(a.v + t * a.v_stride + h * a.dim, a.dim, a.kind, a.values, at);
    }
}

int64_t packed_bytes(const Weight* w) { return size_of(*w); }

// ---- the operations of a step, each with its struct -------------------------------------------------------------------

void call_linear(const void* arguments) {
  const Linear& a = *(const Linear*)arguments;
  linear(a.weight, a.m, a.x, a.bias, a.activation, a.residual, a.y);
}

void call_norm(const void* arguments) { norm(*(const Norm*)arguments); }

void call_activate(const void* arguments) {
  const Activate& a = *(const Activate*)arguments;
  activate(a.activation, a.gated, a.m, a.size, a.x, a.y);
}

void call_rotate(const void* arguments) {
  const Rotate& a = *(const Rotate*)arguments;
  rotate(a.tokens, a.heads, a.dim, a.stride, a.half, a.x, a.cos, a.sin, a.y);
}

void call_store(const void* arguments) { store(*(const Store*)arguments); }

void call_attention(const void* arguments) { attention((const Attention*)arguments); }

}  // namespace

extern const Ops OPS;
const Ops OPS = {packed_bytes, pack, embed, call_linear, call_norm, call_activate, call_rotate, call_store, call_attention};

}  // namespace ISA
