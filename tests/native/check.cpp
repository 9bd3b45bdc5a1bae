// The operations of one library against formulas in double, without Python: for processors that are only emulated here.
//
//   check          every instruction set that runs; prints one line each, exits with 1 if a difference is too large
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../src/writehead/kernels/cpu/native/ops.h"

extern "C" {
const char* writehead_set(int32_t);
const char* writehead_missing(int32_t);
const Ops* writehead_ops(int32_t);
void writehead_threads(int32_t);
}

namespace {

typedef std::vector<float> Floats;

uint64_t state = 1;
float noise() {  // about normal: the sum of four uniform numbers
  float s = 0;
  for (int i = 0; i < 4; i++) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    s += (float)(state >> 40) / (1 << 24) - 0.5f;
  }
  return s * 1.7f;
}
Floats random(size_t n, float scale = 1) {
  Floats x(n);
  for (float& v : x) v = noise() * scale;
  return x;
}

struct Packed {
  std::vector<uint8_t> memory;
  Weight w;
  Packed(const Ops& ops, int kind, int group, int rows, int columns, const Floats& source) {
    w = {nullptr, rows, columns, kind, group};
    memory.resize(ops.packed_bytes(&w) + 64);
    w.data = (void*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    ops.pack(&w, source.data(), FP32, columns);
  }
};

double difference(const Floats& ours, const std::vector<double>& theirs) {
  double most = 0, size = 1e-9;
  for (size_t i = 0; i < ours.size(); i++) {
    if (!(std::fabs(ours[i] - theirs[i]) <= most)) most = std::fabs(ours[i] - theirs[i]);
    size = std::max(size, std::fabs(theirs[i]));
  }
  return most / size;
}

// The weight as the product sees it, one row at a time, is what `embed` gives; for integers x is rounded too, so the bound is wide.
double linear(const Ops& ops, int kind, int group) {
  double worst = 0;
  for (auto [rows, columns] : {std::pair{5, 7}, {33, 100}, {64, 520}}) {
    Packed p(ops, kind, group, rows, columns, random((size_t)rows * columns, 0.05f));
    std::vector<int64_t> ids(rows);
    for (int i = 0; i < rows; i++) ids[i] = i;
    Floats seen((size_t)rows * columns);
    ops.embed(&p.w, rows, ids.data(), seen.data());
    Floats bias = random(rows);
    for (int m : {1, 2, 3, 5, 12, 13, 17, 40}) {
      Floats x = random((size_t)m * columns), residual = random((size_t)m * rows), y((size_t)m * rows, NAN);
      x[columns / 2] = 300;
      std::vector<double> expected;
      for (int i = 0; i < m; i++)
        for (int n = 0; n < rows; n++) {
          double s = bias[n];
          for (int k = 0; k < columns; k++) s += (double)x[(size_t)i * columns + k] * seen[(size_t)n * columns + k];
          expected.push_back(std::max(s, 0.0) + residual[(size_t)i * rows + n]);
        }
      for (int threads : {1, 3}) {
        writehead_threads(threads);
        ops.linear(&p.w, m, x.data(), bias.data(), 4, residual.data(), y.data());
        worst = std::max(worst, difference(y, expected));
        Floats alone(rows);
        ops.linear(&p.w, 1, x.data() + (size_t)(m - 1) * columns, bias.data(), 4, residual.data() + (size_t)(m - 1) * rows, alone.data());
        for (int n = 0; n < rows; n++)
          if (alone[n] != y[(size_t)(m - 1) * rows + n]) return NAN;
      }
    }
  }
  return worst;
}

double attention(const Ops& ops, int heads, int kv_heads, int dim, int64_t window) {
  const int64_t length = 330, capacity = 340, tokens = 5;
  Floats q = random(tokens * heads * dim), k = random(length * kv_heads * dim), v = random(length * kv_heads * dim);
  Floats keys(capacity * kv_heads * dim, NAN), values(capacity * kv_heads * dim, NAN), out(tokens * heads * dim, NAN);
  std::vector<int64_t> rows(length, 0), slots(length);
  for (int64_t i = 0; i < length; i++) slots[i] = i;
  ops.store(length, kv_heads, dim, kv_heads * dim, k.data(), v.data(), rows.data(), slots.data(), capacity, FP32, keys.data(), values.data());
  const float scale = 1 / std::sqrt((float)dim);
  std::vector<double> expected;
  for (int64_t t = 0; t < tokens; t++)
    for (int h = 0; h < heads; h++) {
      int64_t last = length - tokens + t, first = window ? std::max<int64_t>(0, last - window + 1) : 0;
      std::vector<double> weights, mixed(dim, 0.0);
      double sum = 0;
      for (int64_t i = first; i <= last; i++) {
        double s = 0;
        for (int d = 0; d < dim; d++) s += (double)q[(t * heads + h) * dim + d] * k[(i * kv_heads + h / (heads / kv_heads)) * dim + d];
        weights.push_back(std::exp(s * scale));
        sum += weights.back();
        for (int d = 0; d < dim; d++) mixed[d] += weights.back() * v[(i * kv_heads + h / (heads / kv_heads)) * dim + d];
      }
      for (double m : mixed) expected.push_back(m / sum);
    }
  int64_t zero = 0, count = tokens;
  Attention a{q.data(), out.data(), keys.data(), values.data(), &zero, &count, &zero, &length, nullptr, 1, heads, kv_heads, dim,
              heads * dim, capacity, window, 0, scale, FP32};
  double worst = 0;
  for (int threads : {1, 3}) {
    writehead_threads(threads);
    ops.attention(&a);
    worst = std::max(worst, difference(out, expected));
  }
  return worst;
}

double norm(const Ops& ops) {
  const int n = 100;
  Floats x = random(n, 3), weight = random(n), bias = random(n), y(n);
  ops.norm(0, 1, n, x.data(), weight.data(), bias.data(), 1e-5f, 0, y.data());
  double mean = 0, square = 0;
  for (float v : x) mean += v / (double)n;
  for (float v : x) square += (v - mean) * (v - mean) / n;
  std::vector<double> expected;
  for (int i = 0; i < n; i++) expected.push_back((x[i] - mean) / std::sqrt(square + 1e-5) * weight[i] + bias[i]);
  return difference(y, expected);
}

double activations(const Ops& ops) {
  Floats x = random(203, 4), y(203);
  double worst = 0;
  for (int kind = 1; kind <= 4; kind++) {
    ops.activate(kind, 0, 1, 203, x.data(), y.data());
    std::vector<double> expected;
    for (double v : x) {
      double gelu = 0.5 * v * (1 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)));
      expected.push_back(kind == 1 ? gelu : kind == 2 ? 0.5 * v * (1 + std::erf(v / std::sqrt(2.0))) : kind == 3 ? v / (1 + std::exp(-v)) : std::max(v, 0.0));
    }
    worst = std::max(worst, difference(y, expected));
  }
  return worst;
}

}  // namespace

int main() {
  bool good = true;
  for (int i = 0; const char* name = writehead_set(i); i++) {
    if (const char* missing = writehead_missing(i)) {
      std::printf("%s: does not run, %s\n", name, missing);
      continue;
    }
    const Ops& ops = *writehead_ops(i);
    auto report = [&](const char* what, double found, double allowed) {
      bool ok = found <= allowed;
      good &= ok;
      std::printf("%s: %s %.1e, at most %.0e%s\n", name, what, found, allowed, ok ? "" : "  FAILED");
    };
    report("fp32", linear(ops, FP32, 0), 3e-6);
    report("bf16", linear(ops, BF16, 0), 3e-6);
    report("fp16", linear(ops, FP16, 0), 3e-6);
    report("int8", linear(ops, INT8, 0), 2e-2);
    report("int4-32", linear(ops, INT4, 32), 2e-2);
    report("int4-128", linear(ops, INT4, 128), 2e-2);
    report("attention MHA", attention(ops, 4, 4, 24, 0), 1e-6);
    report("attention MQA", attention(ops, 16, 1, 64, 0), 1e-6);
    report("attention GQA with a window", attention(ops, 6, 2, 20, 70), 1e-6);
    report("norm", norm(ops), 1e-6);
    report("activations", activations(ops), 1e-6);
  }
  return good ? 0 : 1;
}
