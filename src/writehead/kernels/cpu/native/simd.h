// Vectors of one instruction set. Each translation unit is compiled for one set (CMakeLists.txt) and puts everything in
// the namespace ISA, so that the linker never mixes code of two sets.
//
// For the same reason no template of the standard library is used in these units: its code would carry no namespace of ours.
//
// VL float lanes a vector. Plain arithmetic uses the compiler's vector extensions; only what they cannot say is here:
// integer dot products, half precision and rounding.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace ISA {

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX2__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

template <class T> static inline T least(T a, T b) { return b < a ? b : a; }
template <class T> static inline T most(T a, T b) { return a < b ? b : a; }

// Memory that grows and is kept; its contents do not survive `take`. Aligned to cache lines.
template <class T> struct Buffer {
  T* data = nullptr;
  int64_t size = 0;

  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data); }

  T* take(int64_t count) {
    if (count > size) {
      std::free(data);
      size = count + count / 4;
      data = (T*)std::aligned_alloc(64, ((size_t)size * sizeof(T) + 63) / 64 * 64);
      if (!data) std::abort();
    }
    return data;
  }
};

constexpr int TILE = 16;  // output channels that are stored side by side
constexpr int TV = TILE / VL;  // vectors of a tile

typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));

template <class T> static inline T loadu(const void* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
template <class T> static inline void storeu(void* p, T x) { std::memcpy(p, &x, sizeof x); }

static inline vf splat(float x) {  // not `vf{} + x`: an addition, because of -0
#if defined(__AVX512F__)
  return (vf)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (vf)_mm256_set1_ps(x);
#else
  return vf{x, x, x, x};
#endif
}
static inline vi splat(int32_t x) { return vi{} + x; }
static inline int32_t word(const void* p) { return loadu<int32_t>(p); }

static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

static inline vf to_float(vi x) { return __builtin_convertvector(x, vf); }

static inline vf max(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

static inline vf abs(vf x) { return (vf)((vi)x & 0x7fffffff); }

// Round to the nearest integer, ties to even, for |x| < 2^22: the addend shifts the fraction out.
static inline vi round_int(vf x) { return (vi)(x + 12582912.0f) - 0x4b400000; }

// Sums over the lanes by halves, always in the same order.
static inline float sum_lanes(vf x) {
  float v[VL];
  storeu(v, x);
  for (int n = VL / 2; n; n /= 2)
    for (int i = 0; i < n; i++) v[i] += v[i + n];
  return v[0];
}
static inline float max_lanes(vf x) {
  float v[VL], m;
  storeu(v, x);
  m = v[0];
  for (int i = 1; i < VL; i++) m = v[i] > m ? v[i] : m;
  return m;
}

static inline float largest(const float* x, int64_t n) {  // of the absolute values; not NaN
  vf m{};
  int64_t i = 0;
  for (; i + VL <= n; i += VL) m = max(m, abs(loadu<vf>(x + i)));
  float r = max_lanes(m);
  for (; i < n; i++) r = most(r, fabsf(x[i]));
  return r;
}

// Four products a lane: acc += sum of w[4i + j] * a[j], the four int8 of `a` the same for every lane.
// `Weights` is a vector of weights made ready once for all rows; `Values` the values of one row. `offset` is what every
// weight carries too much, so the sum starts at -offset * (sum of all values).
#if defined(__AVX512VNNI__)
typedef vi Weights;
typedef vi Values;
constexpr int OFFSET = 128;  // vpdpbusd multiplies unsigned by signed
static inline Weights weights_i8(const void* p) { return loadu<vi>(p) ^ (int32_t)0x80808080; }
static inline Values values_i8(const void* p) { return splat(word(p)); }
static inline vi dot_i8(vi acc, Weights w, Values a) { return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)a); }
static inline vi dot_u4(vi acc, vi w, Values a) { return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)a); }
#elif defined(__AVX2__)
typedef vi Weights;
struct Values { vi signs, size; };
constexpr int OFFSET = 0;
static inline Weights weights_i8(const void* p) { return loadu<vi>(p); }
static inline Values values_i8(const void* p) {
  vi a = splat(word(p));
  return {a, (vi)_mm256_abs_epi8((__m256i)a)};
}
static inline vi pairs(vi acc, __m256i products) {
  return acc + (vi)_mm256_madd_epi16(products, _mm256_set1_epi16(1));
}
static inline vi dot_i8(vi acc, Weights w, Values a) {  // |w| * |a| <= 127 * 127: a pair fits 16 bits
  return pairs(acc, _mm256_maddubs_epi16((__m256i)a.size, _mm256_sign_epi8((__m256i)w, (__m256i)a.signs)));
}
static inline vi dot_u4(vi acc, vi w, Values a) { return pairs(acc, _mm256_maddubs_epi16((__m256i)w, (__m256i)a.signs)); }
#elif defined(__ARM_FEATURE_DOTPROD)
typedef vi Weights;
typedef vi Values;
constexpr int OFFSET = 0;
static inline Weights weights_i8(const void* p) { return loadu<vi>(p); }
static inline Values values_i8(const void* p) { return splat(word(p)); }
static inline vi dot_i8(vi acc, Weights w, Values a) { return vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)a); }
static inline vi dot_u4(vi acc, vi w, Values a) { return dot_i8(acc, w, a); }
#else
typedef vi Weights;
typedef vi Values;
constexpr int OFFSET = 0;
static inline Weights weights_i8(const void* p) { return loadu<vi>(p); }
static inline Values values_i8(const void* p) { return splat(word(p)); }
static inline vi dot_i8(vi acc, Weights w, Values a) {
  for (int shift = 0; shift < 32; shift += 8) acc += ((w << (24 - shift)) >> 24) * ((a << (24 - shift)) >> 24);
  return acc;
}
static inline vi dot_u4(vi acc, vi w, Values a) { return dot_i8(acc, w, a); }
#endif

// 16-bit floats to fp32.
static inline vf from_bf16(const uint16_t* p) {
  typedef uint16_t vh __attribute__((vector_size(2 * VL)));
  return (vf)(__builtin_convertvector(loadu<vh>(p), vu) << 16);
}
static inline float bf16_to_float(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
static inline float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, bits;
  if (rest >= 0x7c00) bits = 0x7f800000 | (rest & 0x3ff) << 13;
  else if (rest >= 0x400) bits = (rest << 13) + 0x38000000;
  else {
    float small = (float)rest * 5.9604644775390625e-8f;  // subnormal: a multiple of 2^-24
    std::memcpy(&bits, &small, 4);
  }
  bits |= sign;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
static inline vf from_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vf x;
  for (int i = 0; i < VL; i++) x[i] = half_to_float(p[i]);
  return x;
#endif
}
static inline uint16_t float_to_bf16(float x) {  // to the nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline uint16_t float_to_half(float x) {  // to the nearest, ties to even
  uint32_t bits, sign;
  std::memcpy(&bits, &x, 4);
  sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (bits < 0x38800000) {  // below 2^-14: let the adder round to multiples of 2^-24
    float small;
    std::memcpy(&small, &bits, 4);
    small += 0.5f;
    std::memcpy(&bits, &small, 4);
    return (uint16_t)(sign | (bits - 0x3f000000));
  }
  bits += 0xfff + (bits >> 13 & 1) - 0x38000000;
  return (uint16_t)(sign | bits >> 13);
}

// e^x to two units in the last place, for any x: beyond the range of fp32 it is 0 or infinity; NaN stays NaN.
static inline vf exp(vf x) {
  vf y = x < -104.0f ? splat(-104.0f) : x;
  y = y > 89.0f ? splat(89.0f) : y;
  vi n = round_int(y * 1.44269504088896341f);
  vf f = to_float(n);
  vf r = fma(f, splat(-0.693145751953125f), y);
  r = fma(f, splat(-1.42860682030941723212e-6f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  vi half = n >> 1;  // in two steps: 2^n alone may be beyond a float
  p = p * (vf)((half + 127) << 23) * (vf)((n - half + 127) << 23);
  return x != x ? x : p;
}

static inline vf tanh(vf x) {  // 1 - 2 / (e^2x + 1); near zero the subtraction would lose digits, so a series there
  vf a = abs(x);
  vf big = 1.0f - 2.0f / (exp(a * 2.0f) + 1.0f);
  vf s = x * x;
  vf p = fma(s, splat(-5.70498872745e-3f), splat(2.06390887954e-2f));
  p = fma(p, s, splat(-5.37397155531e-2f));
  p = fma(p, s, splat(1.33314422036e-1f));
  p = fma(p, s, splat(-3.33332819422e-1f));
  vf small = fma(p * s, x, x);
  return a < 0.625f ? small : (vf)((vi)big | ((vi)x & (int32_t)0x80000000));
}

// GELU without tanh is rare, and the product before it takes far longer: the C library's function, lane by lane.
static inline vf erf(vf x) {
  for (int i = 0; i < VL; i++) x[i] = __builtin_erff(x[i]);
  return x;
}

enum Activation { NONE = 0, GELU_TANH = 1, GELU = 2, SILU = 3, RELU = 4 };

static inline vf activation(vf x, int kind) {
  switch (kind) {
    case GELU_TANH: {
      vf u = 0.7978845608028654f * fma(x * x * x, splat(0.044715f), x);
      return 0.5f * x * (1.0f + tanh(u));
    }
    case GELU: return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
    case SILU: return x / (1.0f + exp(-x));
    case RELU: return x > 0.0f ? x : (x != x ? x : vf{});
    default: return x;
  }
}

}  // namespace ISA
