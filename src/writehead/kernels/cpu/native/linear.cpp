// Matrix products with packed weights. What a row gives depends on that row alone: integer sums are exact in any order, and
// floating-point sums run over the columns in one order, whatever the number of rows, the blocking or the threads.
//
// int8 and int4 read x as rows.h rounds it; the values that stay fp32 are added at the end.

#include "ops.h"
#include "packed.h"
#include "pool.h"
#include "rows.h"
#include "simd.h"

namespace ISA {

#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;
constexpr int tiles_of(int rows) { return rows <= 2 ? 1 : 2; }
constexpr int unroll_of(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : rows <= 4 ? 2 : 1; }
constexpr int MAX_ROWS_INT4 = 6;
constexpr int tiles_of_int4(int rows) { return rows <= 3 ? 4 : 2; }
constexpr int MAX_ROWS_FLOAT = 12;
constexpr int tiles_of_float(int rows) { return rows == 1 ? 8 : rows <= 4 ? 4 : 2; }
#else
constexpr int MAX_ROWS = TV == 2 ? 5 : 4;
constexpr int tiles_of(int) { return 1; }
constexpr int unroll_of(int rows) { return rows == 1 ? 2 : 1; }
constexpr int MAX_ROWS_INT4 = 2;
constexpr int tiles_of_int4(int) { return 1; }
constexpr int MAX_ROWS_FLOAT = TV == 2 ? 6 : 4;
constexpr int tiles_of_float(int rows) { return rows == 1 && TV == 2 ? 4 : 1; }
#endif

// ---- the end of every product -----------------------------------------------------------------------------------------

struct Target {
  const float* bias;
  const float* residual;
  float* y;
  int64_t rows;  // of the weight: the width of y
  int32_t activation;
};

// Bias, activation and residual of 16 outputs of one row; the last tile may be partly beyond the weight.
static inline void finish(const Target& t, int64_t m, int64_t tile, vf* v) {
  int64_t first = tile * TILE, at = m * t.rows + first;
  int count = (int)least<int64_t>(TILE, t.rows - first);
  if (count == TILE) {
    for (int i = 0; i < TV; i++) {
      vf x = v[i];
      if (t.bias) x += loadu<vf>(t.bias + first + i * VL);
      x = activation(x, t.activation);
      if (t.residual) x += loadu<vf>(t.residual + at + i * VL);
      storeu(t.y + at + i * VL, x);
    }
    return;
  }
  float values[TILE];
  for (int i = 0; i < TV; i++) storeu(values + i * VL, v[i]);
  for (int i = 0; i < count; i++) {
    float x = values[i];
    if (t.bias) x += t.bias[first + i];
    x = activation(splat(x), t.activation)[0];
    if (t.residual) x += t.residual[at + i];
    t.y[at + i] = x;
  }
}

// ---- int8 -------------------------------------------------------------------------------------------------------------

static inline void finish_int8(const Weight& w, const Rows& r, const Target& t, int64_t m, int64_t tile, const vi* sums) {
  vf v[TV];
  for (int i = 0; i < TV; i++) v[i] = to_float(sums[i]) * r.scale[m];
  const uint8_t* data = tile_at(w, tile);
  for (int o = 0; o < r.count; o++) {
    int64_t k = r.places[m][o];
    int shift = 24 - 8 * (int)(k % 4);
    for (int i = 0; i < TV; i++) {
      vi word = loadu<vi>(data + k / 4 * 64 + 4 * VL * i);
      v[i] = fma(to_float((word << shift) >> 24), splat(r.outliers[m][o]), v[i]);
    }
  }
  for (int i = 0; i < TV; i++) v[i] *= loadu<vf>(channel_scales(w) + tile * TILE + i * VL);
  finish(t, m, tile, v);
}

template <int MR, int NT, int KU>
static void block_int8(const Weight& w, const Rows& r, const Target& t, int64_t m, int64_t tile) {
  vi acc[KU][MR][NT * TV] = {};
  const uint8_t* data[NT];
  for (int n = 0; n < NT; n++) data[n] = tile_at(w, tile + n);
  const int8_t* a = r.values + m * r.stride;
  for (int64_t k = 0; k < padded_columns(w); k += 4 * KU)
#pragma GCC unroll 8
    for (int u = 0; u < KU; u++) {
      Weights wv[NT * TV];
      for (int n = 0; n < NT; n++) {
        const uint8_t* p = data[n] + (k + 4 * u) * TILE;
        if (MR <= 2) __builtin_prefetch(p + 4096);
        for (int i = 0; i < TV; i++) wv[n * TV + i] = weights_i8(p + 4 * VL * i);
      }
#pragma GCC unroll 12
      for (int i = 0; i < MR; i++) {
        Values av = values_i8(a + i * r.stride + k + 4 * u);
#pragma GCC unroll 8
        for (int j = 0; j < NT * TV; j++) acc[u][i][j] = dot_i8(acc[u][i][j], wv[j], av);
      }
    }
  for (int i = 0; i < MR; i++) {
    for (int j = 0; j < NT * TV; j++) {
      for (int u = 1; u < KU; u++) acc[0][i][j] += acc[u][i][j];
      acc[0][i][j] -= OFFSET * r.sums[m + i];
    }
    for (int n = 0; n < NT; n++) finish_int8(w, r, t, m + i, tile + n, &acc[0][i][n * TV]);
  }
}

template <int MR> static void rows_int8(const Weight& w, const Rows& r, const Target& t, int64_t m, int64_t first, int64_t last) {
  constexpr int NT = tiles_of(MR), KU = unroll_of(MR);
  for (; first + NT <= last; first += NT) block_int8<MR, NT, KU>(w, r, t, m, first);
  for (; first < last; first++) block_int8<MR, 1, KU>(w, r, t, m, first);
}

// ---- int4 -------------------------------------------------------------------------------------------------------------

static inline void finish_int4(const Weight& w, const Rows& r, const Target& t, int64_t m, int64_t tile, vf* v) {
  const uint8_t* data = tile_at(w, tile);
  const uint16_t* scales = group_scales(w, tile);
  for (int i = 0; i < TV; i++) v[i] *= r.scale[m];
  for (int o = 0; o < r.count; o++) {
    int64_t k = r.places[m][o];
    int shift = 8 * (int)(k % 4) + 4 * (int)(k / 4 % 2);
    for (int i = 0; i < TV; i++) {
      vi word = loadu<vi>(data + k / 8 * 64 + 4 * VL * i);
      vf weight = to_float(((word >> shift) & 15) - 8) * from_half(scales + k / w.group * TILE + i * VL);
      v[i] = fma(weight, splat(r.outliers[m][o]), v[i]);
    }
  }
  finish(t, m, tile, v);
}

template <int MR, int NT>
static void block_int4(const Weight& w, const Rows& r, const Target& t, int64_t m, int64_t tile) {
  constexpr int NV = NT * TV;
  vf total[MR][NV] = {};
  const uint8_t* data[NT];
  const uint16_t* scales[NT];
  for (int n = 0; n < NT; n++) data[n] = tile_at(w, tile + n), scales[n] = group_scales(w, tile + n);
  const int8_t* a = r.values + m * r.stride;
  for (int64_t g = 0; g < r.groups; g++) {
    vi acc[MR][NV];
    for (int i = 0; i < MR; i++)
      for (int j = 0; j < NV; j++) acc[i][j] = splat(-8 * r.sums[(m + i) * r.groups + g]);
    for (int64_t k = g * w.group; k < (g + 1) * w.group; k += 8) {
      vi low[NV], high[NV];
      for (int n = 0; n < NT; n++) {
        const uint8_t* p = data[n] + k * (TILE / 2);
        if (MR <= 2) __builtin_prefetch(p + 2048);
        for (int i = 0; i < TV; i++) {
          vi both = loadu<vi>(p + 4 * VL * i);
          low[n * TV + i] = both & 0x0f0f0f0f;
          high[n * TV + i] = (vi)((vu)both >> 4) & 0x0f0f0f0f;
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
        vf scale = from_half(scales[n] + g * TILE + i * VL);
        for (int row = 0; row < MR; row++) total[row][n * TV + i] = fma(to_float(acc[row][n * TV + i]), scale, total[row][n * TV + i]);
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

// ---- fp32, bf16, fp16 -------------------------------------------------------------------------------------------------

template <int KIND> static inline vf weights_float(const uint8_t* p, int64_t at) {
  if (KIND == FP32) return loadu<vf>((const float*)p + at);
  return KIND == BF16 ? from_bf16((const uint16_t*)p + at) : from_half((const uint16_t*)p + at);
}

// The rows of x: where they are, or `stride` apart where that is not their width.
struct Floats {
  const float* values;
  int64_t stride;
};

// Many rows a power of two apart would all fall into the same few sets of the cache: copies lie off it.
static Floats spread(const Weight& w, int64_t m, const float* x) {
  static thread_local Buffer<float> memory;
  if (m == 1) return {x, w.columns};
  Floats f{nullptr, round_up(w.columns, 16) + 16};
  float* to = memory.take(m * f.stride);
  f.values = to;
  pool::parallel((int)least<int64_t>(m, m * w.columns / 65536), [&](int part, int parts) {
    for (int64_t i = m * part / parts; i < m * (part + 1) / parts; i++) std::memcpy(to + i * f.stride, x + i * w.columns, 4 * w.columns);
  });
  return f;
}

template <int KIND, int MR, int NT>
static void block_float(const Weight& w, const Floats& x, const Target& t, int64_t m, int64_t tile) {
  constexpr int NV = NT * TV;
  vf acc[MR][NV] = {};
  const uint8_t* data[NT];
  for (int n = 0; n < NT; n++) data[n] = tile_at(w, tile + n);
  const float* a = x.values + m * x.stride;
  for (int64_t k = 0; k < w.columns; k++) {
    vf wv[NV];
    for (int n = 0; n < NT; n++)
      for (int i = 0; i < TV; i++) wv[n * TV + i] = weights_float<KIND>(data[n], k * TILE + i * VL);
#pragma GCC unroll 12
    for (int i = 0; i < MR; i++) {
      vf av = splat(a[i * x.stride + k]);
#pragma GCC unroll 8
      for (int j = 0; j < NV; j++) acc[i][j] = fma(av, wv[j], acc[i][j]);
    }
  }
  for (int i = 0; i < MR; i++)
    for (int n = 0; n < NT; n++) finish(t, m + i, tile + n, &acc[i][n * TV]);
}

template <int KIND, int MR>
static void rows_float(const Weight& w, const Floats& x, const Target& t, int64_t m, int64_t first, int64_t last) {
  constexpr int NT = tiles_of_float(MR);
  for (; first + NT <= last; first += NT) block_float<KIND, MR, NT>(w, x, t, m, first);
  for (; first < last; first++) block_float<KIND, MR, 1>(w, x, t, m, first);
}

// ---- any number of rows -----------------------------------------------------------------------------------------------

// Calls f.template operator()<R>() for R = rows, 1 to MAX.
template <int MAX, class F> static void with_rows(int rows, F&& f) {
  if constexpr (MAX > 1) {
    if (rows < MAX) return with_rows<MAX - 1>(rows, f);
  }
  f.template operator()<MAX>();
}

// Blocks of nearly equal height cover M rows; some tiles at a time, which stay in the cache while the rows pass.
template <int MAX, class F> static void cover(int64_t m, int64_t first, int64_t last, int64_t panel, F&& f) {
  int64_t blocks = (m + MAX - 1) / MAX;
  for (int64_t tile = first; tile < last; tile += panel)
    for (int64_t b = 0; b < blocks; b++) {
      int64_t start = m * b / blocks, rows = m * (b + 1) / blocks - start;
      with_rows<MAX>((int)rows, [&]<int R>() { f.template operator()<R>(start, tile, least(tile + panel, last)); });
    }
}

template <int KIND> static void linear_float(const Weight& w, int64_t m, const Floats& x, const Target& t, int64_t first, int64_t last) {
  cover<MAX_ROWS_FLOAT>(m, first, last, m <= MAX_ROWS_FLOAT ? last : 2, [&]<int R>(int64_t start, int64_t from, int64_t to) {
    rows_float<KIND, R>(w, x, t, start, from, to);
  });
}

#if defined(WRITEHEAD_AMX)
#include "amx.inc"
#endif

static void linear_int8(const Weight& w, const Rows& r, const Target& t, int64_t m, int64_t first, int64_t last) {
#if defined(WRITEHEAD_AMX)
  if (m >= AMX_ROWS) return amx_int8(w, r, t, m, first, last);
#endif
  cover<MAX_ROWS>(m, first, last, m <= MAX_ROWS ? last : 2, [&]<int R>(int64_t start, int64_t from, int64_t to) {
    rows_int8<R>(w, r, t, start, from, to);
  });
}

static void linear_int4(const Weight& w, const Rows& r, const Target& t, int64_t m, int64_t first, int64_t last) {
  cover<MAX_ROWS_INT4>(m, first, last, m <= MAX_ROWS_INT4 ? last : 2, [&]<int R>(int64_t start, int64_t from, int64_t to) {
    rows_int4<R>(w, r, t, start, from, to);
  });
}

void linear(const Weight* w, int64_t m, const float* x, const float* bias, int32_t activation, const float* residual, float* y) {
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
