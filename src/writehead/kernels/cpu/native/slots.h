// Slots of the cache: where one head keeps the key or the value of one token. Floats lie there as they are; an int8 slot is its
// numbers and, right after them, their scale (fp32). kernels/slots.py is the definition; the bytes are the same.
#pragma once

#include "ops.h"
#include "simd.h"

namespace ISA {

static inline int64_t slot_size(int32_t kind, int64_t dim) { return kind == INT8 ? dim + 4 : dim; }  // in elements

static inline void write_int8(const float* x, int64_t dim, int8_t* to) {
  vi sizes{};  // as bits, whose order is that of the sizes, infinity and NaN last
  int64_t i = 0;
  for (; i + VL <= dim; i += VL) {
    vi bits = loadu<vi>(x + i) & 0x7fffffff;
    sizes = bits > sizes ? bits : sizes;
  }
  int32_t bits = 0;
  for (int j = 0; j < VL; j++) bits = most(bits, sizes[j]);
  for (; i < dim; i++) bits = most(bits, word(x + i) & 0x7fffffff);
  const float size = loadu<float>(&bits);
  const bool zero = size <= 1e-30f, finite = bits < 0x7f800000;
  if (zero || !finite) {
    std::memset(to, 0, dim);
    return storeu(to + dim, zero ? 0.0f : __builtin_nanf(""));
  }
  const float inverse = 127.0f / size;
  for (i = 0; i + VL <= dim; i += VL) to_i8(to + i, round_int(loadu<vf>(x + i) * inverse));
  for (; i < dim; i++) to[i] = (int8_t)nearbyintf(x[i] * inverse);
  storeu(to + dim, size / 127.0f);
}

// The numbers of n int8 slots [n, dim], and their scales [n], by which they are still to be multiplied.
static inline void read_int8(const int8_t* slots, int64_t n, int64_t dim, float* numbers, float* scales) {
  for (int64_t k = 0; k < n; k++, slots += dim + 4, numbers += dim) {
    int64_t d = 0;
    for (; d + VL <= dim; d += VL) storeu(numbers + d, to_float(from_i8(slots + d)));
    for (; d < dim; d++) numbers[d] = slots[d];
    scales[k] = loadu<float>(slots + dim);
  }
}

}  // namespace ISA
