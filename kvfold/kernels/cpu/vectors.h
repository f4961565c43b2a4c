// Vectors of 16 floats in the compiler's vector type, which it splits as the machine needs. Compiled once for each
// instruction set, like all files that include it with KVFOLD_ISA set.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "attend.h"
#include "tile.h"

namespace kvfold::KVFOLD_ISA {
namespace {

constexpr std::size_t kLanes = 16;
constexpr float kNever = -std::numeric_limits<float>::infinity();
// The block of sums, query rows by lanes, that stays in registers.
#if defined(__AVX512F__)
constexpr std::size_t kRows = 6, kWide = 4 * kLanes;
#elif defined(__AVX2__)
constexpr std::size_t kRows = 6, kWide = kLanes;
#else
constexpr std::size_t kRows = 2, kWide = kLanes;
#endif
constexpr std::size_t kPart = kRegister / sizeof(float), kParts = kLanes / kPart;  // lanes of a register, registers of a vector
constexpr std::size_t kRowBlock = 96;   // query rows that go through the pages together
constexpr std::size_t kDenseBlock = 64;  // dense tokens that are read together
constexpr std::size_t kBlock = 4;        // rows whose softmax, or whose products with codes, are taken together

typedef float Vec __attribute__((vector_size(64)));
typedef float Register __attribute__((vector_size(kRegister)));
typedef std::int32_t RegisterInts __attribute__((vector_size(kRegister)));
typedef float Four __attribute__((vector_size(16)));
typedef std::int32_t Ints __attribute__((vector_size(64)));

// Floats on a cache line's boundary, filled or uninitialised. No library's container: its templates would be shared with code
// that was compiled for other instruction sets.
class Buffer {
 public:
  explicit Buffer(std::size_t size = 0, float value = 0.0f) : Buffer(unset(size)) {
    for (std::size_t i = 0; i < size; ++i) data_[i] = value;
  }
  // By malloc, which reuses what was freed last; aligned_alloc does not.
  static Buffer unset(std::size_t size) {
    Buffer made(size, Unset{});
    if (!size) return made;
    made.memory_ = std::malloc(size * sizeof(float) + kAlignment);
    if (!made.memory_) throw std::bad_alloc();
    made.data_ = reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(made.memory_) + kAlignment) / kAlignment * kAlignment);
    return made;
  }
  Buffer(Buffer&& other) noexcept : Buffer(0, Unset{}) { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(memory_, other.memory_), std::swap(data_, other.data_), std::swap(size_, other.size_);
    return *this;
  }
  std::size_t size() const { return size_; }
  ~Buffer() { std::free(memory_); }
  float& operator[](std::size_t i) { return data_[i]; }
  const float& operator[](std::size_t i) const { return data_[i]; }
  float* data() { return data_; }
  const float* data() const { return data_; }

 private:
  static constexpr std::size_t kAlignment = 64;
  struct Unset {};
  Buffer(std::size_t size, Unset) : size_(size) {}

  void* memory_ = nullptr;
  float* data_ = nullptr;
  std::size_t size_;
};

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }
inline void store(float* to, Four v) { std::memcpy(to, &v, sizeof v); }

// Calls visit(i) for constants i from 0 to Count - 1. Arrays indexed by constants stay in registers; by a loop's variable, not.
template <std::size_t Count, typename Visit>
KVFOLD_INLINE void each(Visit visit) {
  [&]<std::size_t... i>(std::index_sequence<i...>) __attribute__((always_inline)) {
    (visit(std::integral_constant<std::size_t, i>{}), ...);
  }(std::make_index_sequence<Count>{});
}

// Compilers take a vector apart into registers for arithmetic. Comparisons, shuffles and sums with a single number they take
// apart into lanes, so these are written for registers.
KVFOLD_INLINE Register part(const Vec& v, std::size_t i) {
  Register out;
  std::memcpy(&out, reinterpret_cast<const char*>(&v) + i * kRegister, kRegister);
  return out;
}
template <typename Wide, typename Part>
KVFOLD_INLINE void put(Wide& v, std::size_t i, Part part) {
  std::memcpy(reinterpret_cast<char*>(&v) + i * kRegister, &part, kRegister);
}

// apply(a, b, …) for the registers of vectors.
template <typename Apply, typename... Vecs>
KVFOLD_INLINE Vec by_register(Apply apply, Vecs... of) {
  Vec out;
  each<kParts>([&](auto i) KVFOLD_LAMBDA { put(out, i, apply(part(of, i)...)); });
  return out;
}

KVFOLD_INLINE Vec all(float x) {
  return by_register([x]() KVFOLD_LAMBDA { return Register{} + x; });
}

// b where a is NaN.
KVFOLD_INLINE Vec larger(Vec a, Vec b) {
  return by_register([](Register x, Register y) KVFOLD_LAMBDA { return x > y ? x : y; }, a, b);
}
KVFOLD_INLINE Vec smaller(Vec a, Vec b) {
  return by_register([](Register x, Register y) KVFOLD_LAMBDA { return x < y ? x : y; }, a, b);
}

#if defined(__AVX512F__)
#define KVFOLD_EACH_LANE(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
#elif defined(__AVX2__)
#define KVFOLD_EACH_LANE(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)
#else
#define KVFOLD_EACH_LANE(f) f(0), f(1), f(2), f(3)
#endif

// For each lane, the lane whose number differs in the Step bit.
template <int Step>
KVFOLD_INLINE Vec partners(Vec v) {
  constexpr int lanes = kPart;
  Vec out;
  each<kParts>([&](auto i) KVFOLD_LAMBDA {
#define KVFOLD_PARTNER(lane) ((lane) ^ (Step % lanes))
    const Register from = part(v, i ^ (Step / lanes));
    put(out, i, __builtin_shufflevector(from, from, KVFOLD_EACH_LANE(KVFOLD_PARTNER)));
#undef KVFOLD_PARTNER
  });
  return out;
}

// Swaps the lanes of each vector that have the Step bit set with the lanes of the vector Step further on that do not.
template <int Step>
KVFOLD_INLINE void exchange(Register (&lines)[kLanes][kParts]) {
  constexpr int lanes = kPart;
  each<kLanes>([&](auto i) KVFOLD_LAMBDA {
    each<kParts>([&](auto w) KVFOLD_LAMBDA {
      if constexpr (Step < lanes && !(i & Step)) {
#define KVFOLD_LOW(lane) ((lane) & Step ? lanes + (lane) - Step : (lane))
#define KVFOLD_HIGH(lane) ((lane) & Step ? lanes + (lane) : (lane) + Step)
        const Register a = lines[i][w], b = lines[i + Step][w];
        lines[i][w] = __builtin_shufflevector(a, b, KVFOLD_EACH_LANE(KVFOLD_LOW));
        lines[i + Step][w] = __builtin_shufflevector(a, b, KVFOLD_EACH_LANE(KVFOLD_HIGH));
#undef KVFOLD_LOW
#undef KVFOLD_HIGH
      } else if constexpr (Step >= lanes && !(i & Step) && !(w & (Step / lanes))) {
        const Register a = lines[i][w + Step / lanes];
        lines[i][w + Step / lanes] = lines[i + Step][w], lines[i + Step][w] = a;
      }
    });
  });
}

inline void transpose(Vec (&lines)[kLanes]) {
  Register parts[kLanes][kParts];
  std::memcpy(&parts, &lines, sizeof parts);
  exchange<8>(parts), exchange<4>(parts), exchange<2>(parts), exchange<1>(parts);
  std::memcpy(&lines, &parts, sizeof parts);
}

// e^x for x ≤ 0, within 1e-7 · (2 + |x|) of itself; below -87 almost 0, or 0. Not for NaN.
KVFOLD_INLINE Vec exp_vec(Vec x) {
#ifdef __AVX512F__
  const __m512 t = _mm512_mul_ps(__m512(x), _mm512_set1_ps(1.44269504f));
  const __mmask16 normal = _mm512_cmp_ps_mask(t, _mm512_set1_ps(-126.0f), _CMP_GT_OQ);  // denormals take hundreds of cycles
  const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec r = Vec(_mm512_sub_ps(t, n));
#else
  Vec t = x * 1.44269504f;
  t = larger(t, all(-126.0f));
  const Vec shifted = t + 12582912.0f, r = t - (shifted - 12582912.0f);  // whole numbers in the low bits
#endif
  Vec p = all(1.32764786e-3f);  // 2^r on [-½, ½]
  p = p * r + 9.67554152e-3f;
  p = p * r + 5.55071290e-2f;
  p = p * r + 2.40221197e-1f;
  p = p * r + 6.93146977e-1f;
  p = p * r + 1.00000007f;
#ifdef __AVX512F__
  return Vec(_mm512_maskz_scalef_ps(normal, __m512(p), n));
#else
  Ints bits, scaled;
  std::memcpy(&bits, &shifted, sizeof bits);
  std::memcpy(&scaled, &p, sizeof scaled);
  scaled += bits << 23;
  Vec out;
  std::memcpy(&out, &scaled, sizeof out);
  return by_register([](Register at, Register y) KVFOLD_LAMBDA { return at < -87.0f ? Register{} : y; }, x, out);
#endif
}

KVFOLD_INLINE Vec square_root(Vec v) {
#if defined(__AVX512F__)
  return Vec(_mm512_sqrt_ps(__m512(v)));
#elif defined(__AVX2__)
  return by_register([](Register x) KVFOLD_LAMBDA { return Register(_mm256_sqrt_ps(__m256(x))); }, v);
#else
  for (std::size_t i = 0; i < kLanes; ++i) v[i] = std::sqrt(v[i]);
  return v;
#endif
}

inline float sum(Vec v) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps(__m512(v));
#endif
  float total = 0;
  for (std::size_t i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

inline float largest(Vec v) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps(__m512(v));
#endif
  v = larger(v, partners<8>(v)), v = larger(v, partners<4>(v)), v = larger(v, partners<2>(v)), v = larger(v, partners<1>(v));
  return v[0];
}

// Reduces the lanes of each of four vectors by `combine`.
template <typename Combine>
KVFOLD_INLINE Four reduce_four(const Vec (&of)[kBlock], Combine combine) {
#define KVFOLD_ONES(lane) ((lane) / 4 * 4 + (lane) / 2 % 2 + (lane) % 2 * int{kPart})
#define KVFOLD_OTHER_ONES(lane) (KVFOLD_ONES(lane) + 2)
#define KVFOLD_PAIRS(lane) ((lane) / 4 * 4 + (lane) % 2 + (lane) / 2 % 2 * int{kPart})
#define KVFOLD_OTHER_PAIRS(lane) (KVFOLD_PAIRS(lane) + 2)
#define KVFOLD_SHUFFLE(lanes) \
  [](Register x, Register y) KVFOLD_LAMBDA { return __builtin_shufflevector(x, y, KVFOLD_EACH_LANE(lanes)); }
  const auto pair = [&](Vec a, Vec b) KVFOLD_LAMBDA {
    return combine(by_register(KVFOLD_SHUFFLE(KVFOLD_ONES), a, b), by_register(KVFOLD_SHUFFLE(KVFOLD_OTHER_ONES), a, b));
  };
  const Vec a = pair(of[0], of[1]), b = pair(of[2], of[3]);
  Vec all = combine(by_register(KVFOLD_SHUFFLE(KVFOLD_PAIRS), a, b), by_register(KVFOLD_SHUFFLE(KVFOLD_OTHER_PAIRS), a, b));
#undef KVFOLD_ONES
#undef KVFOLD_OTHER_ONES
#undef KVFOLD_PAIRS
#undef KVFOLD_OTHER_PAIRS
#undef KVFOLD_SHUFFLE
  all = combine(all, partners<8>(all));
  all = combine(all, partners<4>(all));
  Four out;
  std::memcpy(&out, &all, sizeof out);
  return out;
}
KVFOLD_INLINE Four sum_four(const Vec (&of)[kBlock]) {
  return reduce_four(of, [](Vec a, Vec b) KVFOLD_LAMBDA { return a + b; });
}

// c[Rows][Lanes] (+)= a[Rows][depth] · b[depth][Lanes]. Sums are Registers: compilers keep sums of wider vectors in memory.
template <std::size_t Rows, std::size_t Lanes, bool Add>
void multiply_block(std::size_t depth, const float* a, std::size_t a_row, const float* b, std::size_t b_row, float* c,
                    std::size_t c_row) {
  constexpr std::size_t kAcross = Lanes / kPart;
  Register sums[Rows][kAcross] = {};
  for (std::size_t r = 0; Add && r < Rows; ++r)
    for (std::size_t w = 0; w < kAcross; ++w) std::memcpy(&sums[r][w], c + r * c_row + w * kPart, kRegister);
  for (std::size_t k = 0; k < depth; ++k) {
    Register line[kAcross];
    for (std::size_t w = 0; w < kAcross; ++w) std::memcpy(&line[w], b + k * b_row + w * kPart, kRegister);
    for (std::size_t r = 0; r < Rows; ++r) {
      const float x = a[r * a_row + k];
      for (std::size_t w = 0; w < kAcross; ++w) sums[r][w] += x * line[w];
    }
  }
  for (std::size_t r = 0; r < Rows; ++r)
    for (std::size_t w = 0; w < kAcross; ++w) std::memcpy(c + r * c_row + w * kPart, &sums[r][w], kRegister);
}

template <std::size_t Rows, bool Add>
void multiply_rows(std::size_t depth, std::size_t width, const float* a, std::size_t a_row, const float* b,
                   std::size_t b_row, float* c, std::size_t c_row) {
  std::size_t w = 0;
  for (; w + kWide <= width; w += kWide) multiply_block<Rows, kWide, Add>(depth, a, a_row, b + w, b_row, c + w, c_row);
  for (; w < width; w += kLanes) multiply_block<Rows, kLanes, Add>(depth, a, a_row, b + w, b_row, c + w, c_row);
}

// c (+)= a · b; `width` and the rows of b and c are multiples of 16.
template <bool Add>
void multiply(std::size_t rows, std::size_t depth, std::size_t width, const float* a, std::size_t a_row, const float* b,
              std::size_t b_row, float* c, std::size_t c_row) {
  std::size_t r = 0;
  for (; r + kRows <= rows; r += kRows)
    multiply_rows<kRows, Add>(depth, width, a + r * a_row, a_row, b, b_row, c + r * c_row, c_row);
  const auto rest = [&]<std::size_t Rows>(std::integral_constant<std::size_t, Rows>) {
    if (rows - r == Rows)
      multiply_rows<Rows, Add>(depth, width, a + r * a_row, a_row, b, b_row, c + r * c_row, c_row);
  };
  rest(std::integral_constant<std::size_t, 1>{});
  if constexpr (kRows > 2) {
    rest(std::integral_constant<std::size_t, 2>{});
    rest(std::integral_constant<std::size_t, 3>{});
    rest(std::integral_constant<std::size_t, 4>{});
    rest(std::integral_constant<std::size_t, 5>{});
  }
}

// Calls visit<Rows>(first) over rows in blocks of up to four.
template <typename Visit>
KVFOLD_INLINE void in_blocks(std::size_t rows, Visit visit) {
  std::size_t r = 0;
  for (; r + 4 <= rows; r += 4) visit(std::integral_constant<std::size_t, 4>{}, r);
  if (rows - r == 3) visit(std::integral_constant<std::size_t, 3>{}, r);
  if (rows - r == 2) visit(std::integral_constant<std::size_t, 2>{}, r);
  if (rows - r == 1) visit(std::integral_constant<std::size_t, 1>{}, r);
}

// Calls visit with bits, of 1 to Most, as a constant.
template <unsigned Most, typename Visit>
KVFOLD_INLINE auto with_constant(unsigned bits, Visit visit) {
  if constexpr (Most > 1)
    if (bits < Most) return with_constant<Most - 1>(bits, visit);
  return visit(std::integral_constant<unsigned, Most>{});
}

constexpr std::size_t padded(std::size_t n) { return (n + kTile - 1) / kTile * kTile; }

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
