// Attention over the cache, heads as queries: VL rows (new token x query head) that share a key/value head lie in the lanes
// of one vector, so a key or value is read once for all of them.
//
// The context is cut at fixed places: CHUNK keys fit the first-level cache, SPAN keys are what two threads may share. Each
// chunk gives (largest score m, sum l, mix acc); they are merged in the order of the context. A row's result is therefore a
// function of its query and of the keys it sees: not of other rows, of how a prompt was cut, or of the threads.

#include "ops.h"
#include "pool.h"
#include "simd.h"

namespace ISA {

namespace {

constexpr int CHUNK = 64;
constexpr int64_t SPAN = 256;
constexpr int KEYS = 8;  // keys whose scores are in registers at once

// What a group of LG vectors of rows knows of the context so far.
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
  const vf* q;  // [dim, LG], scaled
  vi position[LG];
  int64_t nearest, furthest;  // smallest and largest position

  int64_t share() const { return a->heads / a->kv_heads; }
  int64_t token(int64_t row) const { return row / share(); }
  int64_t head(int64_t row) const { return kv_head * share() + row % share(); }
  int64_t begin() const { return a->window && nearest >= a->window ? nearest - a->window + 1 : 0; }  // the first key seen
  int64_t end() const { return furthest + 1; }
};

template <int LG> static void read_queries(Rows<LG>& r, vf* q) {
  const Attention& a = *r.a;
  int64_t base = a.length[r.sequence] - a.num_new[r.sequence];
  float* lanes = (float*)q;
  std::memset((void*)q, 0, sizeof(vf) * a.dim * LG);
  for (int64_t i = 0; i < LG * VL; i++) {
    int64_t row = r.first + least(i, r.count - 1);  // lanes beyond the rows repeat the last one; nobody reads them
    int64_t position = base + r.token(row);
    r.position[i / VL][i % VL] = (int32_t)position;
    const float* from = a.q + (a.first_token[r.sequence] + r.token(row)) * a.q_stride + r.head(row) * a.dim;
    for (int64_t d = 0; d < a.dim; d++) lanes[d * LG * VL + i] = from[d] * a.scale;
  }
  r.nearest = base + r.token(r.first);
  r.furthest = base + r.token(r.first + r.count - 1);
  r.q = q;
}

// Up to CHUNK keys or values as fp32: where they are, or converted into `scratch`.
static const float* as_float(const Attention& a, const void* cache, int64_t row, int64_t kv_head, int64_t first, int64_t n, float* scratch) {
  int64_t at = ((row * a.kv_heads + kv_head) * a.capacity + first) * a.dim, total = n * a.dim, i = 0;
  if (a.kind == FP32) return (const float*)cache + at;
  const uint16_t* p = (const uint16_t*)cache + at;
  if (a.kind == BF16) {
    for (; i + VL <= total; i += VL) storeu(scratch + i, from_bf16(p + i));
    for (; i < total; i++) {
      uint32_t bits = (uint32_t)p[i] << 16;
      std::memcpy(scratch + i, &bits, 4);
    }
  } else {
    for (; i + VL <= total; i += VL) storeu(scratch + i, from_half(p + i));
    for (; i < total; i++) scratch[i] = half_to_float(p[i]);
  }
  return scratch;
}

template <int LG> static void score(const Rows<LG>& r, const float* keys, int64_t first, int n, vf (*scores)[LG]) {
  const int64_t dim = r.a->dim;
  constexpr int K = VL == 16 ? KEYS : KEYS / LG;
  for (int k = 0; k < n; k += K) {
    const float* at[K];
    for (int i = 0; i < K; i++) at[i] = keys + least(k + i, n - 1) * dim;
    vf s[K][LG] = {};
    for (int64_t d = 0; d < dim; d++)
#pragma GCC unroll 8
      for (int i = 0; i < K; i++)
#pragma GCC unroll 2
        for (int g = 0; g < LG; g++) s[i][g] = fma(r.q[d * LG + g], splat(at[i][d]), s[i][g]);
    for (int i = 0; i < K && k + i < n; i++)
      for (int g = 0; g < LG; g++) scores[k + i][g] = s[i][g];
  }
  if (r.a->bias)
    for (int k = 0; k < n; k++)
      for (int i = 0; i < LG * VL; i++)
        scores[k][i / VL][i % VL] += r.a->bias[r.head(r.first + least<int64_t>(i, r.count - 1)) * r.a->bias_stride + first + k];
  const int64_t window = r.a->window;
  bool all = first + n - 1 <= r.nearest && (!window || first > r.furthest - window);
  if (all) return;
  for (int k = 0; k < n; k++)
    for (int g = 0; g < LG; g++) {
      int32_t key = (int32_t)(first + k);
      vf hidden = splat(-__builtin_inff());
      scores[k][g] = r.position[g] < key ? hidden : scores[k][g];
      if (window) scores[k][g] = r.position[g] - (int32_t)window >= key ? hidden : scores[k][g];
    }
}

template <int LG> static void mix(const float* values, int64_t dim, int n, const vf (*weights)[LG], vf* acc) {
  constexpr int D = VL == 16 ? KEYS : KEYS / LG;
  int64_t d = 0;
  for (; d + D <= dim; d += D) {
    vf s[D][LG] = {};
    for (int k = 0; k < n; k++)
#pragma GCC unroll 8
      for (int i = 0; i < D; i++)
#pragma GCC unroll 2
        for (int g = 0; g < LG; g++) s[i][g] = fma(weights[k][g], splat(values[k * dim + d + i]), s[i][g]);
    for (int i = 0; i < D; i++)
      for (int g = 0; g < LG; g++) acc[(d + i) * LG + g] = s[i][g];
  }
  for (; d < dim; d++)
    for (int g = 0; g < LG; g++) {
      vf s{};
      for (int k = 0; k < n; k++) s = fma(weights[k][g], splat(values[k * dim + d]), s);
      acc[d * LG + g] = s;
    }
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

// Memory of one thread, five pieces of it.
thread_local Buffer<float> scratch;

float* piece(int i, int64_t floats) { return scratch.take(5 * floats) + i * floats; }

// Floats of a piece: values of all rows, or a chunk of keys; whole cache lines.
int64_t piece_floats(int64_t dim) { return most<int64_t>(dim * 2 * VL, CHUNK * ((dim + 15) / 16 * 16)); }

// Keys from..to, at most SPAN of them and cut where all others are, into `s`.
template <int LG> static void span(const Rows<LG>& r, int64_t from, int64_t to, State<LG>& s) {
  const Attention& a = *r.a;
  const int64_t dim = a.dim;
  const int64_t floats = piece_floats(dim);
  vf scores[CHUNK][LG];
  State<LG> one;
  one.acc = (vf*)piece(0, floats);
  float* converted = piece(1, floats);
  s.clear(dim);
  for (int64_t first = from; first < to;) {
    int64_t last = least(to, (first / CHUNK + 1) * CHUNK);
    int n = (int)(last - first);
    score(r, as_float(a, a.keys, a.row[r.sequence], r.kv_head, first, n, converted), first, n, scores);
    for (int g = 0; g < LG; g++) {
      one.m[g] = splat(-1e30f);
      for (int k = 0; k < n; k++) one.m[g] = max(one.m[g], scores[k][g]);
      one.l[g] = vf{};
      for (int k = 0; k < n; k++) {
        scores[k][g] = exp(scores[k][g] - one.m[g]);
        one.l[g] += scores[k][g];
      }
    }
    mix<LG>(as_float(a, a.values, a.row[r.sequence], r.kv_head, first, n, converted), dim, n, scores, one.acc);
    merge(s, one, dim);
    first = last;
  }
}

template <int LG> static void write(const Rows<LG>& r, const State<LG>& s) {
  const Attention& a = *r.a;
  const float* acc = (const float*)s.acc;
  for (int64_t i = 0; i < r.count; i++) {
    float* to = a.out + ((a.first_token[r.sequence] + r.token(r.first + i)) * a.heads + r.head(r.first + i)) * a.dim;
    float sum = s.l[i / VL][i % VL];
    for (int64_t d = 0; d < a.dim; d++) to[d] = acc[d * LG * VL + i] / sum;
  }
}

struct Item {
  int64_t sequence, kv_head, first, count;
};

template <int LG> static Rows<LG> open(const Attention& a, const Item& item, vf* q) {
  Rows<LG> r{};
  r.a = &a;
  r.sequence = item.sequence, r.kv_head = item.kv_head, r.first = item.first, r.count = item.count;
  read_queries(r, q);
  return r;
}

template <int LG> static void whole(const Attention& a, const Item& item) {
  const int64_t floats = piece_floats(a.dim);
  Rows<LG> r = open<LG>(a, item, (vf*)piece(2, floats));
  State<LG> total, part;
  total.acc = (vf*)piece(3, floats);
  part.acc = (vf*)piece(4, floats);
  total.clear(a.dim);
  for (int64_t from = r.begin(); from < r.end();) {
    int64_t to = least(r.end(), (from / SPAN + 1) * SPAN);
    span(r, from, to, part);
    merge(total, part, a.dim);
    from = to;
  }
  write(r, total);
}

// Few rows and a long context: the threads share the spans, and the merge follows in the same order as in `whole`.
template <int LG> static void shared(const Attention& a, const Item* items, int64_t num_items, int parts) {
  static thread_local Buffer<vf> memory;
  static thread_local Buffer<State<LG>> states;
  const int64_t spans = (a.capacity + SPAN - 1) / SPAN;
  int64_t longest = 0;
  for (int64_t i = 0; i < num_items; i++) longest = most(longest, (a.length[items[i].sequence] + SPAN - 1) / SPAN);
  const int64_t each = least(spans, longest), count = num_items * each, floats = piece_floats(a.dim);
  vf* accs = memory.take(count * a.dim * LG);
  State<LG>* all = states.take(count);
  pool::parallel(parts, [&](int part, int n) {
    for (int64_t u = part; u < count; u += n) {
      Rows<LG> r = open<LG>(a, items[u / each], (vf*)piece(2, floats));
      all[u].acc = accs + u * a.dim * LG;
      int64_t from = most(r.begin(), u % each * SPAN), to = least(r.end(), (u % each + 1) * SPAN);
      span(r, from, to, all[u]);
    }
  });
  for (int64_t i = 0; i < num_items; i++) {
    Rows<LG> r = open<LG>(a, items[i], (vf*)piece(2, floats));
    State<LG> total;
    total.acc = (vf*)piece(3, floats);
    total.clear(a.dim);
    for (int64_t s = r.begin() / SPAN; s < (r.end() + SPAN - 1) / SPAN; s++) merge(total, all[i * each + s], a.dim);
    write(r, total);
  }
}

}  // namespace

void attention(const Attention* a) {
  static thread_local Buffer<Item> buffer;
  const int64_t share = a->heads / a->kv_heads;
  int64_t most_items = 0, count = 0, work = 0;
  for (int64_t s = 0; s < a->sequences; s++) most_items += a->kv_heads * (a->num_new[s] * share / VL + 1);
  Item* items = buffer.take(most_items);
  bool pairs = false;
  for (int64_t s = 0; s < a->sequences; s++)
    for (int64_t h = 0; h < a->kv_heads; h++)
      for (int64_t rows = a->num_new[s] * share, first = 0; first < rows;) {
        int64_t lanes = rows - first > VL ? 2 * VL : VL;
        items[count] = {s, h, first, least(rows - first, lanes)};
        work += items[count].count * a->length[s] * a->dim;
        pairs |= items[count++].count > VL;
        first += lanes;
      }
  int parts = (int)least<int64_t>(pool::size(), 1 + work / 32768);
  if (parts > 1 && count < 2 * parts) return pairs ? shared<2>(*a, items, count, parts) : shared<1>(*a, items, count, parts);
  pool::parallel(parts, [&](int part, int n) {
    for (int64_t i = part; i < count; i += n) items[i].count > VL ? whole<2>(*a, items[i]) : whole<1>(*a, items[i]);
  });
}

}  // namespace ISA
