// The operations, as the table that each instruction set fills. All pointers are to dense fp32 unless it says otherwise;
// sizes are in elements. The C ABI of the library is this table's functions and those of dispatch.cpp.
#pragma once

#include <cstdint>

enum Kind { FP32 = 0, BF16 = 1, FP16 = 2, INT8 = 3, INT4 = 4 };

// A packed weight [rows, columns]: tiles of 16 rows. Columns are padded to whole units of the kind.
//   FP32, BF16, FP16   [tile][column][16 rows]
//   INT8               [tile][column / 4][16 rows][4 columns], then a scale a row (fp32)
//   INT4               [tile][column / 8][16 rows][4 bytes]: low halves columns 0-3, high halves 4-7, each plus 8;
//                      then [tile][column / group][16 steps, 16 offsets] (int8), then a scale a row (fp32).
//                      (half - 8) * step + offset is an int8 weight under the row's scale.
struct Weight {
  const void* data;
  int64_t rows, columns;
  int32_t kind, group;
};

// The arguments of an operation of a step, one struct each, so that a call can be kept and repeated.

// y [M, weight.rows] = activation(x [M, weight.columns] * w^T + bias) + residual; bias and residual may be null, y may be
// residual.
struct Linear {
  const Weight* weight;
  int64_t m;
  const float* x;
  const float* bias;
  const float* residual;
  float* y;
  int32_t activation;
};

// y [T, heads, size] = layer norm of x, whose tokens are `stride` apart, or with rms nonzero x / rms(x) * (weight + offset);
// bias may be null.
struct Norm {
  int64_t tokens, heads, size, stride;
  const float* x;
  const float* weight;
  const float* bias;
  float* y;
  float eps, offset;
  int32_t rms;
};

// y [M, size] = activation(x); gated: x [M, 2 size] = gate | up, y = activation(gate) * up.
struct Activate {
  int64_t m, size;
  const float* x;
  float* y;
  int32_t activation, gated;
};

// x [T, heads, dim], whose tokens are `stride` apart; cos and sin [T, half]; y dense. The first 2 half values turn.
struct Rotate {
  int64_t tokens, heads, dim, stride, half;
  const float* x;
  const float* cos;
  const float* sin;
  float* y;
};

// k and v [T, K, dim], tokens `k_stride` and `v_stride` apart, to cache [rows, K, capacity, slot] of kind FP32, BF16, FP16 or
// INT8. A slot is `dim` numbers; those of INT8 are followed by their scale (fp32).
struct Store {
  int64_t tokens, kv_heads, dim, k_stride, v_stride, capacity;
  const float* k;
  const float* v;
  const int64_t* rows;
  const int64_t* slots;
  void* keys;
  void* values;
  int32_t kind;
};

// One call of attention: `groups` runs of sequences, each with `num_new` tokens a sequence. Sequence s has its new tokens at
// `first_token[s]`, its cache row in `row[s]`, and `length[s]` tokens in the cache.
struct Attention {
  const float* q;  // [T, heads, dim], tokens `q_stride` apart
  float* out;  // [T, heads, dim], dense
  const void* keys;  // [rows, kv_heads, capacity, slot]
  const void* values;
  const int64_t* first_token;
  const int64_t* num_new;
  const int64_t* row;
  const int64_t* length;
  const float* bias;  // [heads, bias_stride] added to the scores, or null
  int64_t sequences, heads, kv_heads, dim, q_stride, capacity, window, bias_stride;  // window 0: all keys
  float scale;
  int32_t kind;
};

typedef void Operation(const void* arguments);  // of its struct

// One call, kept. writehead_replay repeats an array of them.
struct Call {
  Operation* operation;
  const void* arguments;
};

struct Ops {
  // Bytes of a packed weight; `data` is not read.
  int64_t (*packed_bytes)(const Weight* w);
  // Rounds `source` [rows, columns], of kind FP32, BF16 or FP16, whose rows are `stride` apart, into `w->data`.
  void (*pack)(const Weight* w, const void* source, int32_t source_kind, int64_t stride);
  // y [count, columns]: the rows of w that `ids` names. 0 if one of them is none: then y is not written.
  int32_t (*embed)(const Weight* w, int64_t count, const int64_t* ids, float* y);
  Operation *linear, *norm, *activate, *rotate, *store, *attention;
};
