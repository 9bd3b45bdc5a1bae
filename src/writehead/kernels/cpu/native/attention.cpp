// Attention over the cache, heads as queries: VL rows (new token x query head) that share a key/value head lie in the lanes
// of one vector, so a key or value is read once for all of them.
//
// The context is cut at fixed places, and each part gives (largest score m, sum l, mix acc); they are merged in the order of
// the context. A row's result is therefore a function of its query and of the keys it sees: not of other rows, of how a
// prompt was cut, or of the threads. Which way computes a part depends on the model alone, for the same reason.

#include "attention_vectors.h"
#include "pool.h"
#if defined(WRITEHEAD_AMX)
#include "attention_amx.h"
#endif

namespace ISA {

namespace {

struct Item {  // rows of one sequence and head
  int64_t sequence, kv_head, first, count;
};

// Block `i` of an item, with its queries at `q`.
template <class Way, int LG> Rows<LG> open(const Attention& a, const Item& item, int i, vf* q) {
  Rows<LG> r{};
  const int64_t skipped = (int64_t)i * LG * VL;
  r.a = &a, r.q = q;
  r.sequence = item.sequence, r.kv_head = item.kv_head;
  r.first = item.first + skipped, r.count = least<int64_t>(LG * VL, item.count - skipped);
  r.place();
  Way::read(r);
  return r;
}

template <class Way, int LG> void whole(const Attention& a, const Item& item) {
  static thread_local Buffer<vf> memory;
  const int64_t size = a.dim * LG;
  const int count = (int)((item.count + LG * VL - 1) / (LG * VL));
  vf* at = memory.take(3 * count * size);
  Rows<LG> r[Way::BLOCKS];
  State<LG> total[Way::BLOCKS], part[Way::BLOCKS];
  for (int i = 0; i < count; i++, at += 3 * size) {
    r[i] = open<Way, LG>(a, item, i, at);
    total[i].acc = at + size;
    part[i].acc = at + 2 * size;
    total[i].clear(a.dim);
  }
  for (int64_t from = r[0].begin(), end = r[count - 1].end(); from < end;) {
    int64_t to = least(end, (from / SPAN + 1) * SPAN);
    Way::span(r, count, from, to, part);
    for (int i = 0; i < count; i++) merge(total[i], part[i], a.dim);
    from = to;
  }
  for (int i = 0; i < count; i++) Way::write(r[i], total[i]);
}

// Few rows and a long context: the threads share the spans, and the merge follows in the same order as in `whole`. Items
// are of one block.
template <class Way, int LG> void shared(const Attention& a, const Item* items, int64_t num_items, int parts) {
  static thread_local Buffer<vf> memory, own;
  static thread_local Buffer<State<LG>> states;
  int64_t each = 0;
  for (int64_t i = 0; i < num_items; i++) each = most(each, (a.length[items[i].sequence] + SPAN - 1) / SPAN);
  const int64_t count = num_items * each, size = a.dim * LG;
  vf* accs = memory.take(count * size);
  State<LG>* all = states.take(count);
  pool::parallel(parts, [&](int part, int n) {
    for (int64_t u = part; u < count; u += n) {
      Rows<LG> r = open<Way, LG>(a, items[u / each], 0, own.take(size));
      all[u].acc = accs + u * size;
      int64_t from = most(r.begin(), u % each * SPAN), to = least(r.end(), (u % each + 1) * SPAN);
      if (from < to) Way::span(&r, 1, from, to, all + u);
    }
  });
  for (int64_t i = 0; i < num_items; i++) {
    vf* at = own.take(2 * size);
    Rows<LG> r = open<Way, LG>(a, items[i], 0, at);
    State<LG> total;
    total.acc = at + size;
    total.clear(a.dim);
    for (int64_t s = r.begin() / SPAN; s < (r.end() + SPAN - 1) / SPAN; s++) merge(total, all[i * each + s], a.dim);
    Way::write(r, total);
  }
}

// Items of at most `blocks` blocks of two vectors; returns how many.
int64_t cut(const Attention& a, int64_t blocks, Buffer<Item>& items) {
  const int64_t share = a.heads / a.kv_heads, lanes = blocks * 2 * VL;
  int64_t count = 0;
  for (int64_t s = 0; s < a.sequences; s++) count += a.kv_heads * ((a.num_new[s] * share + lanes - 1) / lanes);
  Item* item = items.take(count);
  for (int64_t s = 0; s < a.sequences; s++)
    for (int64_t h = 0; h < a.kv_heads; h++)
      for (int64_t rows = a.num_new[s] * share, first = 0; first < rows; first += lanes)
        *item++ = {s, h, first, least(rows - first, lanes)};
  return count;
}

template <class Way> void attend(const Attention& a) {
  static thread_local Buffer<Item> items;
  int64_t work = 0;
  for (int64_t s = 0; s < a.sequences; s++) work += a.heads * a.num_new[s] * a.length[s] * a.dim;
  const int parts = (int)least<int64_t>(pool::size(), 1 + work / 32768);
  int64_t count = cut(a, Way::BLOCKS, items);
  if (parts > 1 && count < 2 * parts) {
    count = cut(a, 1, items);
    bool pairs = false;
    for (int64_t i = 0; i < count; i++) pairs |= items.data[i].count > VL;
    if (count < 2 * parts) return pairs ? shared<Way, 2>(a, items.data, count, parts) : shared<Way, 1>(a, items.data, count, parts);
  }
  const Item* all = items.data;  // not `items`, of which each thread has one
  pool::parallel(parts, [&](int part, int n) {
    for (int64_t i = part; i < count; i += n) all[i].count > VL ? whole<Way, 2>(a, all[i]) : whole<Way, 1>(a, all[i]);
  });
}

}  // namespace

void attention(const Attention* a) {
#if defined(WRITEHEAD_AMX)
  if (OnTiles::takes(*a)) return attend<OnTiles>(*a);
#endif
  attend<OnVectors>(*a);
}

}  // namespace ISA
