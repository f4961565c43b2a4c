// Numbers of each dtype to floats, and back.
#pragma once

#include "vectors.h"

namespace kvfold::KVFOLD_ISA {
namespace {

inline float from_half(std::uint16_t bits) {
#ifdef __F16C__
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
#else
  const std::uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  float value;
  if (rest >= 0x0400u) {  // normal, infinite or NaN
    const std::uint32_t u = sign | ((rest << 13) + (rest >= 0x7c00u ? 224u << 23 : 112u << 23));
    std::memcpy(&value, &u, 4);
  } else {
    value = static_cast<float>(rest) * 0x1p-24f;
    if (sign) value = -value;
  }
  return value;
#endif
}

inline void from_halves(const std::uint16_t* from, std::size_t count, float* to) {
  std::size_t i = 0;
#ifdef __AVX512F__
  for (; i + 16 <= count; i += 16)
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
#endif
#ifdef __F16C__
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
  for (; i < count; ++i) to[i] = from_half(from[i]);
}

inline float from_brain(std::uint16_t bits) {
  const std::uint32_t u = std::uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &u, 4);
  return value;
}

inline float from(Dtype dtype, const void* data, std::size_t i) {
  switch (dtype) {
    case Dtype::float32:
      return static_cast<const float*>(data)[i];
    case Dtype::float16:
      return from_half(static_cast<const std::uint16_t*>(data)[i]);
    case Dtype::bfloat16:
      break;
  }
  return from_brain(static_cast<const std::uint16_t*>(data)[i]);
}

// `count` ≤ 16 numbers from data[i] on, and zeros.
KVFOLD_INLINE Vec load_some(Dtype dtype, const void* data, std::size_t i, std::size_t count) {
  if (count == kLanes && dtype == Dtype::float32) return load(static_cast<const float*>(data) + i);
#if defined(__AVX512F__)
  if (count == kLanes) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const std::uint16_t*>(data) + i));
    if (dtype == Dtype::float16) return Vec(_mm512_cvtph_ps(halves));
    return Vec(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)));
  }
#elif defined(__F16C__)
  if (count == kLanes) {
    Vec out;
    each<kParts>([&](auto w) KVFOLD_LAMBDA {
      const auto* from = reinterpret_cast<const __m128i*>(static_cast<const std::uint16_t*>(data) + i + w * kPart);
      const __m128i halves = _mm_loadu_si128(from);
      put(out, w, dtype == Dtype::float16 ? _mm256_cvtph_ps(halves)
                                          : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)));
    });
    return out;
  }
#endif
  float some[kLanes] = {};
  for (std::size_t k = 0; k < count; ++k) some[k] = from(dtype, data, i + k);
  return load(some);
}

inline std::uint16_t to_half(float x) {
  const _Float16 half = static_cast<_Float16>(x);
  std::uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

// Rounded to float16.
inline Vec in_half(Vec v) {
#if defined(__AVX512F__)
  return Vec(_mm512_cvtph_ps(_mm512_cvtps_ph(__m512(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)));
#elif defined(__F16C__)
  return by_register(
      [](Register x) KVFOLD_LAMBDA { return Register(_mm256_cvtph_ps(_mm256_cvtps_ph(__m256(x), _MM_FROUND_TO_NEAREST_INT))); }, v);
#else
  for (std::size_t i = 0; i < kLanes; ++i) v[i] = from_half(to_half(v[i]));
  return v;
#endif
}

// Rounded to bfloat16, to nearest even. NaN stays as it is.
inline Vec in_brain(Vec v) {
  std::uint32_t __attribute__((vector_size(64))) bits;
  std::memcpy(&bits, &v, sizeof bits);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & ~0xffffu;
  Vec out;
  std::memcpy(&out, &bits, sizeof out);
  return by_register([](Register x, Register y) KVFOLD_LAMBDA { return x - x == Register{} ? y : x; }, v, out);
}

inline Vec rounded(Dtype dtype, Vec v) {
  return dtype == Dtype::float32 ? v : dtype == Dtype::float16 ? in_half(v) : in_brain(v);
}

// Stores the first `count` of the numbers that `rounded` returned.
inline void store_some(Dtype dtype, void* data, std::size_t i, std::size_t count, Vec v) {
  if (dtype == Dtype::float32) {
    std::memcpy(static_cast<float*>(data) + i, &v, count * sizeof(float));
    return;
  }
  std::uint16_t some[kLanes];
  if (dtype == Dtype::float16) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(some), _mm512_cvtps_ph(__m512(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    each<kParts>([&](auto w) KVFOLD_LAMBDA {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(some + w * kPart), _mm256_cvtps_ph(__m256(part(v, w)), _MM_FROUND_TO_NEAREST_INT));
    });
#else
    for (std::size_t k = 0; k < kLanes; ++k) some[k] = to_half(v[k]);
#endif
  } else {
    Ints bits;
    std::memcpy(&bits, &v, sizeof bits);
    for (std::size_t k = 0; k < kLanes; ++k) some[k] = static_cast<std::uint16_t>(bits[k] >> 16);
  }
  std::memcpy(static_cast<std::uint16_t*>(data) + i, some, count * sizeof *some);
}

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
