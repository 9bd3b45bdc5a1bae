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

// VL int8 to and from lanes. Intrinsics, since compilers take conversions of vectors apart.
static inline vi from_i8(const int8_t* p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return vi{p[0], p[1], p[2], p[3]};
#endif
}
static inline void to_i8(int8_t* p, vi x) {  // of lanes from -128 to 127
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(__AVX2__)
  __m128i half = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(half, half));
#else
  for (int i = 0; i < VL; i++) p[i] = (int8_t)x[i];
#endif
}

// Sums over the lanes by halves, always in the same order.
static inline float sum_lanes(vf x) {
  float v[VL];
  storeu(v, x);
  for (int n = VL / 2; n; n /= 2)
    for (int i = 0; i < n; i++) v[i] += v[i + n];
  return v[0];
}
static inline int32_t sum_lanes(vi x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t s = 0;
  for (int i = 0; i < VL; i++) s += x[i];
  return s;
#endif
}
static inline float max_lanes(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float v[VL], m;
  storeu(v, x);
  m = v[0];
  for (int i = 1; i < VL; i++) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

// A bit for each lane that is all ones; the other lanes are zero.
static inline uint32_t lanes_of(vi x) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)x);
#elif defined(__AVX2__)
  return (uint32_t)_mm256_movemask_ps((__m256)x);
#else
  uint32_t bits = 0;
  for (int i = 0; i < VL; i++) bits |= (uint32_t)(x[i] & 1) << i;
  return bits;
#endif
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
// weight carries too much, so the sum starts at -offset * (sum of all values). `dot_u4` takes weights from 0 to 15.
#if defined(__AVX512VNNI__)
typedef vi Weights;
typedef vi Values;
constexpr int OFFSET = 128;  // vpdpbusd multiplies unsigned by signed
static inline Weights weights_i8(vi w) { return w ^ (int32_t)0x80808080; }
static inline Values values_i8(const void* p) { return splat(word(p)); }
static inline vi dot_i8(vi acc, Weights w, Values a) { return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)a); }
static inline vi dot_u4(vi acc, vi w, Values a) { return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)a); }
#elif defined(__AVX2__)
typedef vi Weights;
struct Values { vi signs, size; };
constexpr int OFFSET = 0;
static inline Weights weights_i8(vi w) { return w; }
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
static inline Weights weights_i8(vi w) { return w; }
static inline Values values_i8(const void* p) { return splat(word(p)); }
static inline vi dot_i8(vi acc, Weights w, Values a) { return vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)a); }
static inline vi dot_u4(vi acc, vi w, Values a) { return dot_i8(acc, w, a); }
#else
typedef vi Weights;
typedef vi Values;
constexpr int OFFSET = 0;
static inline Weights weights_i8(vi w) { return w; }
static inline Values values_i8(const void* p) { return splat(word(p)); }
static inline vi dot_i8(vi acc, Weights w, Values a) {
  for (int shift = 0; shift < 32; shift += 8) acc += ((w << (24 - shift)) >> 24) * ((a << (24 - shift)) >> 24);
  return acc;
}
static inline vi dot_u4(vi acc, vi w, Values a) { return dot_i8(acc, w, a); }
#endif

// 16-bit floats to fp32.
static inline vf from_bf16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)((vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)) << 16);
#elif defined(__AVX2__)
  return (vf)((vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16);
#else
  return (vf)(vu{p[0], p[1], p[2], p[3]} << 16);
#endif
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
  vf t = fma(y, splat(1.44269504088896341f), splat(12582912.0f));  // rounds to an integer, as in round_int
  vf f = t - 12582912.0f;
  vf r = fma(f, splat(-0.693145751953125f), y);
  r = fma(f, splat(-1.42860682030941723212e-6f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)f);
#else
  vi n = (vi)t - 0x4b400000, half = n >> 1;  // in two steps: 2^n alone may be beyond a float
  return p * (vf)((half + 127) << 23) * (vf)((n - half + 127) << 23);
#endif
}

// x / (1 + e^y): x times the logistic function of -y.
static inline vf logistic(vf x, vf y) {
  vf d = 1.0f + exp(y);
#if defined(__AVX512F__)
  vf r = (vf)_mm512_rcp14_ps((__m512)d);  // and a step of Newton's: a division takes four times as long
  r = fma(fma(-d, r, splat(1.0f)), r, r);
  return x * (d < 1e38f ? r : vf{});
#else
  return x / d;
#endif
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
      vf u = fma(x * x * x, splat(0.044715f), x);
      return logistic(x, u * -1.5957691216057308f);  // (1 + tanh(y)) / 2 = 1 / (1 + e^-2y)
    }
    case GELU: return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
    case SILU: return logistic(x, -x);
    case RELU: return x > 0.0f ? x : (x != x ? x : vf{});
    default: return x;
  }
}

}  // namespace ISA
