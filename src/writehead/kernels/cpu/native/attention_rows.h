// What both ways of computing attention share (attention_vectors.h and attention_amx.h): rows in lanes, what they may see, and
// how the parts of the context are joined.
#pragma once

#include "ops.h"
#include "simd.h"
#include "slots.h"

namespace ISA {

constexpr int64_t SPAN = 256;  // keys that two threads may share: the context is cut at its multiples

// What LG vectors of rows know of a part of the context: largest score m, sum of weights l, and the weighted sum of values.
template <int LG> struct State {
  vf m[LG], l[LG];
  vf* acc;  // [dim, LG]

  void clear(int64_t dim) {
    for (int i = 0; i < LG; i++) m[i] = splat(-1e30f), l[i] = vf{};
    std::memset((void*)acc, 0, sizeof(vf) * dim * LG);
  }
};

template <int LG> struct Rows {
  const Attention* a;
  int64_t sequence, kv_head, first, count;  // rows first..first + count of this sequence and head
  vf* q;  // scaled; up to dim * LG vectors, in the layout of one way
  vi position[LG];
  int64_t nearest, furthest;  // smallest and largest position

  int64_t share() const { return a->heads / a->kv_heads; }
  int64_t token(int64_t row) const { return row / share(); }
  int64_t head(int64_t row) const { return kv_head * share() + row % share(); }
  int64_t lane_row(int64_t lane) const { return first + least(lane, count - 1); }  // lanes beyond the rows repeat the last one; nobody reads them
  int64_t begin() const { return a->window && nearest >= a->window ? nearest - a->window + 1 : 0; }  // the first key seen
  int64_t end() const { return furthest + 1; }
  const float* query(int64_t row) const { return a->q + (a->first_token[sequence] + token(row)) * a->q_stride + head(row) * a->dim; }
  float* out(int64_t row) const { return a->out + ((a->first_token[sequence] + token(row)) * a->heads + head(row)) * a->dim; }
  // Where key or value `at` begins, in elements of the cache.
  int64_t slot(int64_t at) const {
    return ((a->row[sequence] * a->kv_heads + kv_head) * a->capacity + at) * slot_size(a->kind, a->dim);
  }

  void place() {  // positions
    int64_t base = a->length[sequence] - a->num_new[sequence];
    for (int64_t i = 0; i < LG * VL; i++) position[i / VL][i % VL] = (int32_t)(base + token(lane_row(i)));
    nearest = base + token(first);
    furthest = base + token(first + count - 1);
  }
};

// Scores of keys first..first + n: the bias is added, and keys that a row does not see become -infinity.
template <int LG> static void finish_scores(const Rows<LG>& r, int64_t first, int64_t n, vf (*scores)[LG]) {
  if (r.a->bias) {
    const float* bias[LG * VL];
    for (int i = 0; i < LG * VL; i++) bias[i] = r.a->bias + r.head(r.lane_row(i)) * r.a->bias_stride + first;
    for (int64_t k = 0; k < n; k++)
      for (int i = 0; i < LG * VL; i++) scores[k][i / VL][i % VL] += bias[i][k];
  }
  const int64_t window = r.a->window;
  const vf hidden = splat(-__builtin_inff());
  for (int64_t k = most<int64_t>(0, r.nearest + 1 - first); k < n; k++)
    for (int g = 0; g < LG; g++) scores[k][g] = r.position[g] < (int32_t)(first + k) ? hidden : scores[k][g];
  if (!window) return;
  for (int64_t k = 0; k < least(n, r.furthest - window + 1 - first); k++)
    for (int g = 0; g < LG; g++) scores[k][g] = r.position[g] - (int32_t)window >= (int32_t)(first + k) ? hidden : scores[k][g];
}

// The later part of the context joins the earlier one. A part that a lane does not see changes nothing in that lane.
template <int LG> static void merge(State<LG>& s, const State<LG>& later, int64_t dim) {
  for (int g = 0; g < LG; g++) {
    vf m = max(s.m[g], later.m[g]);
    vf old = exp(s.m[g] - m), add = exp(later.m[g] - m);
    s.m[g] = m;
    s.l[g] = fma(s.l[g], old, later.l[g] * add);
    for (int64_t d = 0; d < dim; d++) s.acc[d * LG + g] = fma(s.acc[d * LG + g], old, later.acc[d * LG + g] * add);
  }
}

}  // namespace ISA
