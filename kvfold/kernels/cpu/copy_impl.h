// Body of copy; each copy_<set>.cpp compiles it under its own name.
#include "copy.h"
#include "fold_tile.h"

namespace kvfold::KVFOLD_ISA {
namespace {

// As bfloat16 holds them, to the nearest and to even. Not for NaN.
inline Vec in_brain(Vec v) {
  std::uint32_t __attribute__((vector_size(64))) bits;
  std::memcpy(&bits, &v, sizeof bits);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & ~0xffffu;
  Vec out;
  std::memcpy(&out, &bits, sizeof out);
  return v - v == Vec{} ? out : v;
}

inline Vec rounded(Dtype dtype, Vec v) {
  return dtype == Dtype::float32 ? v : dtype == Dtype::float16 ? in_half(v) : in_brain(v);
}

// The first `count` of numbers that `rounded` made.
inline void store_some(Dtype dtype, void* data, std::size_t i, std::size_t count, Vec v) {
  if (dtype == Dtype::float32) {
    std::memcpy(static_cast<float*>(data) + i, &v, count * sizeof(float));
    return;
  }
  std::uint16_t some[kLanes];
  if (dtype == Dtype::float16) {
#ifdef __AVX512F__
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(some), _mm512_cvtps_ph(__m512(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
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

bool copy(const Copy& job) {
  Vec nothing{};  // NaN in a lane once a number is not finite
  for (std::size_t b = 0; b < job.batch; ++b)
    for (std::size_t h = 0; h < job.heads; ++h)
      for (std::size_t t = 0; t < job.tokens; ++t) {
        const std::size_t from = b * job.from.batch + h * job.from.head + t * job.from.token;
        const std::size_t to = b * job.to.batch + h * job.to.head + t * job.to.token;
        for (std::size_t c = 0; c < job.dim; c += kLanes) {
          const std::size_t count = std::min(kLanes, job.dim - c);
          const Vec v = rounded(job.to.dtype, load_some(job.from.dtype, job.from.at, from + c, count));
          nothing += v * 0.0f;
          store_some(job.to.dtype, const_cast<void*>(job.to.at), to + c, count, v);
        }
      }
  return sum(nothing) == 0.0f;
}

}  // namespace kvfold::KVFOLD_ISA
