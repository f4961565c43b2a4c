// The body of attention, compiled once for each instruction set: attend_serial.cpp and its siblings include it with
// KVFOLD_ISA set to their namespace. Vectors are the compiler's own, so that it splits them as the machine needs.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <utility>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "attend.h"
#include "tile.h"

namespace kvfold::KVFOLD_ISA {
namespace {

constexpr std::size_t kLanes = 16;
constexpr float kNever = -std::numeric_limits<float>::infinity();
#ifdef __AVX512F__
constexpr std::size_t kRows = 6;  // query rows whose sums stay in registers together
#else
constexpr std::size_t kRows = 2;
#endif
constexpr std::size_t kRowBlock = 96;   // query rows that go through the pages together
constexpr std::size_t kDenseBlock = 64;  // dense tokens that are read together

typedef float Vec __attribute__((vector_size(64)));
typedef std::int32_t Ints __attribute__((vector_size(64)));

// Zeroed floats on a cache line's boundary. Ours, as a library's templates would be shared with code that was compiled
// for other instruction sets.
class Buffer {
 public:
  explicit Buffer(std::size_t size = 0, float value = 0.0f)
      : data_(static_cast<float*>(std::aligned_alloc(64, (size * sizeof(float) + 64) / 64 * 64))) {
    if (!data_) throw std::bad_alloc();
    for (std::size_t i = 0; i < size; ++i) data_[i] = value;
  }
  Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~Buffer() { std::free(data_); }
  float& operator[](std::size_t i) { return data_[i]; }
  const float& operator[](std::size_t i) const { return data_[i]; }
  float* data() { return data_; }
  const float* data() const { return data_; }

 private:
  float* data_;
};

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }
inline Vec all(float x) { return Vec{} + x; }

inline float from_half(std::uint16_t bits) {
#ifdef __AVX512F__
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
#else
  const std::uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  float value;
  if (rest >= 0x0400u) {  // normal; infinity and NaN are never stored
    const std::uint32_t u = sign | ((rest << 13) + (112u << 23));
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
  for (; i < count; ++i) to[i] = from_half(from[i]);
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
  const std::uint32_t u = std::uint32_t{static_cast<const std::uint16_t*>(data)[i]} << 16;
  float value;
  std::memcpy(&value, &u, 4);
  return value;
}

// Asks memory for `count` numbers that will be read soon. Pages of a head follow each other, so the one that is kAhead
// pages on can be asked for while this one is worked on; beyond the last page nothing happens.
constexpr std::size_t kAhead = 4;
template <typename T>
inline void ask_for(const T* from, std::size_t count) {
  const char* at = reinterpret_cast<const char*>(from);
  for (std::size_t i = 0; i < count * sizeof(T); i += 64) __builtin_prefetch(at + i, 0, 2);
}

// e^x for x ≤ 0, within 2 units in the last place; 0 below -87.
inline Vec exp_vec(Vec x) {
  const Vec low = all(-87.0f);
  const Ints tiny = x < low;
  x = tiny ? low : x;
  const Vec shifted = x * 1.44269504f + 12582912.0f;  // rounds to whole numbers in the low bits
  const Vec n = shifted - 12582912.0f;
  Vec r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Ints bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  Ints scaled;
  std::memcpy(&scaled, &p, sizeof scaled);
  scaled += bits << 23;
  Vec out;
  std::memcpy(&out, &scaled, sizeof out);
  return tiny ? Vec{} : out;
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
  float most = v[0];
  for (std::size_t i = 1; i < kLanes; ++i) most = std::max(most, v[i]);
  return most;
}

// c[rows][16·Width] (+)= a[rows][depth] · b[depth][16·Width]
template <std::size_t Rows, std::size_t Width, bool Add>
void multiply_block(std::size_t depth, const float* a, std::size_t a_row, const float* b, std::size_t b_row, float* c,
                    std::size_t c_row) {
  Vec sums[Rows][Width];
  for (std::size_t r = 0; r < Rows; ++r)
    for (std::size_t w = 0; w < Width; ++w) sums[r][w] = Add ? load(c + r * c_row + w * kLanes) : Vec{};
  for (std::size_t k = 0; k < depth; ++k) {
    Vec line[Width];
    for (std::size_t w = 0; w < Width; ++w) line[w] = load(b + k * b_row + w * kLanes);
    for (std::size_t r = 0; r < Rows; ++r) {
      const float x = a[r * a_row + k];
      for (std::size_t w = 0; w < Width; ++w) sums[r][w] += x * line[w];
    }
  }
  for (std::size_t r = 0; r < Rows; ++r)
    for (std::size_t w = 0; w < Width; ++w) store(c + r * c_row + w * kLanes, sums[r][w]);
}

template <std::size_t Rows, bool Add>
void multiply_rows(std::size_t depth, std::size_t width, const float* a, std::size_t a_row, const float* b,
                   std::size_t b_row, float* c, std::size_t c_row) {
  std::size_t w = 0;
  for (; w + 4 * kLanes <= width; w += 4 * kLanes)
    multiply_block<Rows, 4, Add>(depth, a, a_row, b + w, b_row, c + w, c_row);
  for (; w < width; w += kLanes) multiply_block<Rows, 1, Add>(depth, a, a_row, b + w, b_row, c + w, c_row);
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

constexpr std::size_t padded(std::size_t n) { return (n + kTile - 1) / kTile * kTile; }

#ifdef __AVX512F__
// The codes of one tile: byte 4 · lane + j of fields[f] is that of step 4 · f + j.
inline void tile_fields(const std::uint8_t* packed, unsigned bits, __m512i fields[4]) {
  const __m512i low = _mm512_set1_epi8(15), pair = _mm512_set1_epi8(3);
  if (bits >= 4 && bits <= 7) {
    for (int v = 0; v < 2; ++v) {
      const __m512i x = _mm512_loadu_si512(packed + 64 * v);
      fields[2 * v] = _mm512_and_si512(x, low);
      fields[2 * v + 1] = _mm512_and_si512(_mm512_srli_epi16(x, 4), low);
    }
    packed += 128;
    if (bits & 2) {
      const __m512i x = _mm512_loadu_si512(packed);
      for (int f = 0; f < 4; ++f)
        fields[f] = _mm512_or_si512(fields[f], _mm512_slli_epi16(_mm512_and_si512(_mm512_srli_epi16(x, 2 * f), pair), 4));
      packed += 64;
    }
    if (bits & 1)
      for (int f = 0; f < 4; ++f) {
        std::uint64_t mask;
        std::memcpy(&mask, packed + 8 * f, 8);
        fields[f] = _mm512_or_si512(fields[f], _mm512_maskz_set1_epi8(mask, static_cast<char>(bits == 5 ? 16 : 64)));
      }
  } else if (bits == 3 || bits == 2) {
    const __m512i x = _mm512_loadu_si512(packed);
    for (int f = 0; f < 4; ++f) fields[f] = _mm512_and_si512(_mm512_srli_epi16(x, 2 * f), pair);
    if (bits == 2) return;
    for (int f = 0; f < 4; ++f) {
      std::uint64_t mask;
      std::memcpy(&mask, packed + 64 + 8 * f, 8);
      fields[f] = _mm512_or_si512(fields[f], _mm512_maskz_set1_epi8(mask, 4));
    }
  } else {
    Tile tile;
    decode(packed, bits, tile);
    for (int f = 0; f < 4; ++f) fields[f] = _mm512_load_si512(tile.fields[f]);
  }
}
#endif

// The levels of one tile, lane by lane, one vector a step: out[step · stride].
inline void look_up_tile(const std::uint8_t* packed, unsigned bits, const float* lut, float* out, std::size_t stride) {
#ifdef __AVX512F__
  __m512i fields[4];
  tile_fields(packed, bits, fields);
  if (bits <= 4) {
    // Rows of the table hold at least 2^bits levels; the rest of the vector is never asked for.
    const __m512 levels = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << (1u << bits)) - 1), lut);
    for (int f = 0; f < 4; ++f)
      for (int j = 0; j < 4; ++j) {
        const __m512i index = _mm512_srli_epi32(fields[f], 8 * j);
        _mm512_storeu_ps(out + (4 * f + j) * stride, _mm512_permutexvar_ps(index, levels));
      }
    return;
  }
  if (bits <= 6) {  // 32 or 64 levels in registers; gathering them from memory would take several times as long
    const std::size_t last = (std::size_t{1} << bits) - 32;
    const __m512 a = _mm512_loadu_ps(lut), b = _mm512_loadu_ps(lut + 16);
    const __m512 c = _mm512_loadu_ps(lut + last), d = _mm512_loadu_ps(lut + last + 16);
    for (int f = 0; f < 4; ++f)
      for (int j = 0; j < 4; ++j) {
        const __m512i index = _mm512_srli_epi32(fields[f], 8 * j);
        const __mmask16 upper = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
        _mm512_storeu_ps(out + (4 * f + j) * stride,
                         _mm512_mask_blend_ps(upper, _mm512_permutex2var_ps(a, index, b), _mm512_permutex2var_ps(c, index, d)));
      }
    return;
  }
  const __m512i byte = _mm512_set1_epi32(255);
  for (int f = 0; f < 4; ++f)
    for (int j = 0; j < 4; ++j) {
      const __m512i index = _mm512_and_si512(_mm512_srli_epi32(fields[f], 8 * j), byte);
      _mm512_storeu_ps(out + (4 * f + j) * stride, _mm512_i32gather_ps(index, lut, 4));
    }
#else
  Tile tile;
  decode(packed, bits, tile);
  for (std::size_t step = 0; step < kTile; ++step)
    for (std::size_t lane = 0; lane < kTile; ++lane)
      out[step * stride + lane] = lut[tile.fields[step / 4][4 * lane + step % 4]];
#endif
}

// One page in rotated coordinates: z + a + s · S ⊙ lut[code], as [channel][token] for keys and [token][channel] for
// values, with rows padded to whole vectors.
class Page {
 public:
  explicit Page(const Side& side)
      : side_(side),
        width_(padded(side.shape.head_dim)),
        size_(side.shape.page_size),
        scratch_(width_ * size_),
        scale_(size_ * side.groups, 1.0f),
        offset_(size_ * side.groups),
        centre_(width_),
        channel_scale_(width_, 1.0f) {}

  const Side& side() const { return side_; }
  const float* scale() const { return scale_.data(); }
  const float* offset() const { return offset_.data(); }
  const float* centre() const { return centre_.data(); }

  // Channels of a row, or tokens of one: what a row of `data` holds.
  std::size_t row() const { return side_.shape.lanes_are_tokens ? size_ : width_; }
  const float* data() const { return scratch_.data(); }

  void unfold(std::size_t batch, std::size_t head, std::size_t page) {
    const std::uint8_t* code = find(batch, head, page);
    if (side_.shape.bits == nullptr)
      numbers(code);
    else if (side_.shape.lanes_are_tokens)
      keys(code);
    else
      values(code);
  }

  // Takes a page's scales, offsets and centre, and returns where its codes are.
  const std::uint8_t* find(std::size_t batch, std::size_t head, std::size_t page) {
    const std::size_t per_token = size_ * side_.groups;
    const std::size_t at = batch * side_.scale_batch + head * side_.scale_head + page * per_token;
    const std::size_t middle = batch * side_.centre_batch + head * side_.centre_head + page * side_.centre_dim;
    if (side_.scale) ask_for(side_.scale + at + kAhead * per_token, per_token);
    if (side_.offset) ask_for(side_.offset + at + kAhead * per_token, per_token);
    if (side_.centre) ask_for(side_.centre + middle + kAhead * side_.centre_dim, side_.centre_dim);
    // (token, group) to (group, token): a group's scales lie side by side for keys.
    if (side_.scale) spread(side_.scale + at, scale_.data());
    if (side_.offset) spread(side_.offset + at, offset_.data());
    if (side_.centre) from_halves(side_.centre + middle, side_.centre_dim, centre_.data());
    if (side_.channel_scale) from_halves(side_.channel_scale + middle, side_.centre_dim, channel_scale_.data());
    const std::size_t page_bytes = side_.shape.bits ? side_.shape.code_bytes() : 2 * size_ * side_.shape.head_dim;
    return side_.code + batch * side_.code_batch + head * side_.code_head + page * page_bytes;
  }

 private:
  void spread(const std::uint16_t* from, float* to) const {
    if (side_.groups == 1) return from_halves(from, size_, to);
    for (std::size_t t = 0; t < size_; ++t)
      for (std::size_t g = 0; g < side_.groups; ++g) to[g * size_ + t] = from_half(from[t * side_.groups + g]);
  }

  std::size_t group_of(std::size_t channel) const {
    return std::min(channel * side_.groups / side_.shape.head_dim, side_.groups - 1);
  }

  void keys(const std::uint8_t* code) {
    const bool plain = !side_.channel_scale && !side_.offset;
    for (std::size_t first = 0; first < size_; first += kTile)
      for (std::size_t tile = 0; tile < width_ / kTile; ++tile) {
        const unsigned bits = side_.shape.bits[tile];
        float* out = scratch_.data() + tile * kTile * size_ + first;
        look_up_tile(code, bits, side_.lut + tile * side_.lut_stride, out, size_);
        code += 32 * bits;
        const std::size_t group = group_of(tile * kTile) * size_;
        const Vec scale = load(&scale_[group + first]), offset = load(&offset_[group + first]);
        const float *z = &centre_[tile * kTile], *s = &channel_scale_[tile * kTile];
        if (plain)
          for (std::size_t c = 0; c < kTile; ++c) store(out + c * size_, load(out + c * size_) * scale + z[c]);
        else
          for (std::size_t c = 0; c < kTile; ++c)
            store(out + c * size_, load(out + c * size_) * s[c] * scale + (offset + z[c]));
      }
  }

  void values(const std::uint8_t* code) {
    const bool plain = !side_.channel_scale && !side_.offset;
    for (std::size_t tile = 0; tile < width_ / kTile; ++tile) {
      const unsigned bits = side_.shape.bits[tile];
      const std::size_t group = group_of(tile * kTile) * size_;
      const Vec z = load(&centre_[tile * kTile]), s = load(&channel_scale_[tile * kTile]);
      for (std::size_t first = 0; first < size_; first += kTile) {
        float* out = scratch_.data() + first * width_ + tile * kTile;
        look_up_tile(code, bits, side_.lut + tile * side_.lut_stride, out, width_);
        code += 32 * bits;
        const float *scale = &scale_[group + first], *offset = &offset_[group + first];
        if (plain)
          for (std::size_t t = 0; t < kTile; ++t) store(out + t * width_, load(out + t * width_) * scale[t] + z);
        else
          for (std::size_t t = 0; t < kTile; ++t)
            store(out + t * width_, load(out + t * width_) * s * scale[t] + (z + offset[t]));
      }
    }
  }

  // Pages whose codes are float16 numbers.
  void numbers(const std::uint8_t* code) {
    const std::size_t channels = side_.shape.head_dim;
    for (std::size_t t = 0; t < size_; ++t)
      for (std::size_t c = 0; c < channels; ++c) {
        std::uint16_t bits;
        std::memcpy(&bits, code + 2 * (t * channels + c), 2);
        const std::size_t to = side_.shape.lanes_are_tokens ? c * size_ + t : t * width_ + c;
        scratch_[to] = from_half(bits) * scale_[t];
      }
  }

  const Side& side_;
  std::size_t width_, size_;
  Buffer scratch_, scale_, offset_, centre_, channel_scale_;
};

#ifdef __AVX512VNNI__
// Integer products over one page. Levels become 8-bit numbers, low + step · u8 for keys and middle + step · s8 for
// values, queries s8 and weights u8; the error of both is below 1 % of that of codes of up to 4 bits.
class IntegerPage {
 public:
  explicit IntegerPage(Page& page) : page_(page), tiles_(padded(page.side().shape.head_dim) / kTile) {
    const Side& side = page.side();
    fits_ = side.shape.bits && side.groups == 1 && !side.channel_scale;
    for (std::size_t g = 0; fits_ && g < tiles_; ++g) fits_ = side.shape.bits[g] <= 4;
    if (!fits_) return;
    levels_ = Buffer(side.shape.page_size * tiles_ * kTile / sizeof(float));
    tables_ = Buffer(tiles_ * kTile / sizeof(float)), step_ = Buffer(tiles_), base_ = Buffer(tiles_);
    for (std::size_t g = 0; g < tiles_; ++g) {
      const float* lut = side.lut + g * side.lut_stride;
      const std::size_t count = std::size_t{1} << side.shape.bits[g];
      float low = lut[0], high = lut[0];
      for (std::size_t i = 1; i < count; ++i) low = std::min(low, lut[i]), high = std::max(high, lut[i]);
      const bool keys = side.shape.lanes_are_tokens;
      base_[g] = keys ? low : (low + high) / 2;
      step_[g] = std::max(high - low, 1e-30f) / (keys ? 255.0f : 254.0f);
      auto* table = reinterpret_cast<std::int8_t*>(tables_.data()) + g * kTile;
      for (std::size_t i = 0; i < count; ++i)
        table[i] = static_cast<std::int8_t>(static_cast<int>(std::lrint((lut[i] - base_[g]) / step_[g])));
    }
  }

  bool fits() const { return fits_; }
  float step(std::size_t channel) const { return step_[channel / kTile]; }
  float base(std::size_t channel) const { return base_[channel / kTile]; }

  // Vectors of 64 levels: [channel tile][field][token tile] for keys, [token tile][field][channel tile] for values.
  void unpack(const std::uint8_t* code) {
    const Side& side = page_.side();
    const std::size_t token_tiles = side.shape.page_size / kTile;
    const bool keys = side.shape.lanes_are_tokens;
    const std::size_t outer = keys ? token_tiles : tiles_, inner = keys ? tiles_ : token_tiles;
    const std::size_t page_bytes = side.shape.code_bytes();
    for (std::size_t o = 0; o < outer; ++o)
      for (std::size_t i = 0; i < inner; ++i) {
        const std::size_t g = keys ? i : o;
        const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(
            reinterpret_cast<const __m128i*>(reinterpret_cast<const std::uint8_t*>(tables_.data()) + g * kTile)));
        ask_for(code + kAhead * page_bytes, 32 * side.shape.bits[g]);
        __m512i fields[4];
        tile_fields(code, side.shape.bits[g], fields);
        code += 32 * side.shape.bits[g];
        for (std::size_t f = 0; f < 4; ++f) {
          const std::size_t at = (i * 4 + f) * outer + o;
          _mm512_store_si512(reinterpret_cast<std::uint8_t*>(levels_.data()) + 64 * at,
                             _mm512_shuffle_epi8(table, fields[f]));
        }
      }
  }

  // sums[r][16 · (first + w) + lane] of the products of Rows rows with Width of the `outer` lines of vectors.
  template <std::size_t Rows, std::size_t Width, bool LevelsAreUnsigned>
  void multiply(std::size_t depth, std::size_t outer, std::size_t first, const std::uint8_t* rows, std::size_t row_bytes,
                __m512i (&sums)[Rows][Width]) const {
    const auto* levels = reinterpret_cast<const std::uint8_t*>(levels_.data()) + 64 * first;
    for (std::size_t r = 0; r < Rows; ++r)
      for (std::size_t w = 0; w < Width; ++w) sums[r][w] = _mm512_setzero_si512();
    for (std::size_t k = 0; k < depth; k += 4, levels += 64 * outer) {
      __m512i line[Width];
      for (std::size_t w = 0; w < Width; ++w) line[w] = _mm512_load_si512(levels + 64 * w);
      for (std::size_t r = 0; r < Rows; ++r) {
        std::int32_t four;
        std::memcpy(&four, rows + r * row_bytes + k, 4);
        const __m512i x = _mm512_set1_epi32(four);
        for (std::size_t w = 0; w < Width; ++w)
          sums[r][w] = LevelsAreUnsigned ? _mm512_dpbusd_epi32(sums[r][w], line[w], x)
                                         : _mm512_dpbusd_epi32(sums[r][w], x, line[w]);
      }
    }
  }

 private:
  Page& page_;
  std::size_t tiles_;
  bool fits_ = false;
  Buffer levels_, tables_, step_, base_;
};

// A row of numbers as 8-bit integers.
struct IntegerRows {
  Buffer numbers, scale, base, sum;  // numbers: bytes
  std::size_t row_bytes;
  IntegerRows(std::size_t rows, std::size_t width)
      : numbers(rows * width / sizeof(float)), scale(rows), base(rows), sum(rows), row_bytes(width) {}
  std::uint8_t* row(std::size_t r) { return reinterpret_cast<std::uint8_t*>(numbers.data()) + r * row_bytes; }
};
#endif

// Softmax state of a block of query rows.
struct State {
  Buffer rotated, plain, maximum, total;
  explicit State(std::size_t rows = 0, std::size_t rotated_width = 0, std::size_t plain_width = 0)
      : rotated(rows * rotated_width),
        plain(rows * plain_width),
        maximum(rows, kNever),
        total(rows) {}
};

// Rows `first` to `first + count` of the (repeat, queries) rows of one batch row and KV head, over some blocks of keys.
class Worker {
 public:
  Worker(const Attention& job)
      : job_(job),
        key_page_(job.keys),
        value_page_(job.values),
        rotated_width_(padded(job.values.shape.head_dim)),
        plain_width_(padded(job.value_dim)),
        size_(job.keys.shape.page_size),
        scores_(kRowBlock * std::max(size_, kDenseBlock)),
        dense_key_(job.key_dim * kDenseBlock),
        dense_value_(kDenseBlock * plain_width_)
#ifdef __AVX512VNNI__
        ,
        integer_keys_(key_page_),
        integer_values_(value_page_),
        integer_queries_(kRowBlock, padded(job.keys.shape.head_dim)),
        integer_weights_(kRowBlock, size_),
        integer_(job.pages && integer_keys_.fits() && integer_values_.fits())
#endif
  {
  }

  std::size_t rotated_width() const { return rotated_width_; }
  std::size_t plain_width() const { return plain_width_; }

  void run(State& state, std::size_t batch, std::size_t head, std::size_t first, std::size_t count,
           std::size_t block_begin, std::size_t block_end) {
    batch_ = batch, head_ = head, first_ = first, count_ = count;
    const std::size_t rows = job_.repeat * job_.queries, base = (batch * job_.kv_heads + head) * rows + first;
    const float* rotated_query = job_.rotated_query + base * job_.keys.shape.head_dim;
    const float* query = job_.query + base * job_.key_dim;
#ifdef __AVX512VNNI__
    if (integer_ && block_begin < job_.pages) prepare_queries(rotated_query);
#endif
    for (std::size_t block = block_begin; block < block_end; ++block) {
      if (block < job_.pages) {
        const std::int64_t start = job_.pages_first + static_cast<std::int64_t>(block * size_);
        if (!visible(start, static_cast<std::int64_t>(size_), nullptr, job_.folded_stop)) continue;
#ifdef __AVX512VNNI__
        if (integer_) {
          read_integers(state, rotated_query, batch, head, block, start);
          continue;
        }
#endif
        key_page_.unfold(batch, head, block);
        value_page_.unfold(batch, head, block);
        read(state, state.rotated.data(), rotated_width_, rotated_query, job_.keys.shape.head_dim, key_page_.data(),
             value_page_.data(), start, size_, size_, nullptr, job_.folded_stop);
      } else {
        std::size_t rest = block - job_.pages, at = 0;
        while (rest >= blocks(job_.spans[at])) rest -= blocks(job_.spans[at++]);
        const Span& span = job_.spans[at];
        const std::size_t from = rest * kDenseBlock, tokens = std::min(kDenseBlock, span.tokens - from);
        const std::int64_t start = span.first + static_cast<std::int64_t>(from);
        if (!visible(start, static_cast<std::int64_t>(tokens), span.start, span.stop)) continue;
        unpack(span, from, tokens);
        read(state, state.plain.data(), plain_width_, query, job_.key_dim, dense_key_.data(), dense_value_.data(), start,
             tokens, kDenseBlock, span.start, span.stop);
      }
    }
  }

  static std::size_t blocks(const Span& span) { return (span.tokens + kDenseBlock - 1) / kDenseBlock; }

 private:
  std::size_t query_of(std::size_t row) const { return (first_ + row) % job_.queries; }

  // Whether some row may look at positions from `start` on; `starts` and `stops` bound each query's view.
  bool visible(std::int64_t start, std::int64_t tokens, const std::int64_t* starts, const std::int64_t* stops) const {
    for (std::size_t r = 0; r < count_; ++r) {
      const std::size_t q = query_of(r);
      if (stops[q] > start && (!starts || starts[q] < start + tokens)) return true;
    }
    return false;
  }

  void unpack(const Span& span, std::size_t from_token, std::size_t tokens) {
    const std::size_t key_at = batch_ * span.key_batch + head_ * span.key_head + from_token * span.key_token;
    const std::size_t value_at = batch_ * span.value_batch + head_ * span.value_head + from_token * span.value_token;
    for (std::size_t t = 0; t < kDenseBlock; ++t) {
      const bool real = t < tokens;
      for (std::size_t c = 0; c < job_.key_dim; ++c)
        dense_key_[c * kDenseBlock + t] = real ? from(span.dtype, span.key, key_at + t * span.key_token + c) : 0.0f;
      for (std::size_t c = 0; c < job_.value_dim; ++c)
        dense_value_[t * plain_width_ + c] = real ? from(span.dtype, span.value, value_at + t * span.value_token + c) : 0.0f;
    }
  }

  // Reads keys [depth][stride] and values [tokens][width] into the state.
  void read(State& state, float* sums, std::size_t width, const float* query, std::size_t depth, const float* keys,
            const float* values, std::int64_t start, std::size_t tokens, std::size_t stride, const std::int64_t* starts,
            const std::int64_t* stops) {
    float* scores = scores_.data();
    multiply<false>(count_, depth, stride, query, depth, keys, stride, scores, stride);
    for (std::size_t r = 0; r < count_; ++r) weigh(state, r, scores + r * stride, start, tokens, stride, starts, stops);
    multiply<true>(count_, tokens, width, scores, stride, values, width, sums, width);
  }

#ifdef __AVX512VNNI__
  // q̃ times the keys' step, as s8 with a scale a row; and Σ q̃ · base, Σ q̃.
  void prepare_queries(const float* rotated_query) {
    const std::size_t channels = job_.keys.shape.head_dim;
    for (std::size_t r = 0; r < count_; ++r) {
      const float* q = rotated_query + r * channels;
      float most = 0, base = 0, total = 0;
      for (std::size_t c = 0; c < channels; ++c) {
        most = std::max(most, std::fabs(q[c] * integer_keys_.step(c)));
        base += q[c] * integer_keys_.base(c);
        total += q[c];
      }
      auto* out = reinterpret_cast<std::int8_t*>(integer_queries_.row(r));
      const float inverse = most > 0 ? 127.0f / most : 0.0f;
      for (std::size_t c = 0; c < channels; ++c)
        out[c] = static_cast<std::int8_t>(std::lrint(q[c] * integer_keys_.step(c) * inverse));
      integer_queries_.scale[r] = most / 127.0f;
      integer_queries_.base[r] = base;
      integer_queries_.sum[r] = total;
    }
  }

  template <std::size_t Rows, std::size_t Width>
  void integer_scores(std::size_t r, std::size_t tile, float* scores) {
    __m512i sums[Rows][Width];
    integer_keys_.multiply<Rows, Width, true>(padded(job_.keys.shape.head_dim), size_ / kTile, tile,
                                              integer_queries_.row(r), integer_queries_.row_bytes, sums);
    for (std::size_t i = 0; i < Rows; ++i)
      for (std::size_t w = 0; w < Width; ++w) {
        const __m512 y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[i][w]), _mm512_set1_ps(integer_queries_.scale[r + i]),
                                         _mm512_set1_ps(integer_queries_.base[r + i]));
        const std::size_t t = (tile + w) * kTile;
        __m512 s = _mm512_fmadd_ps(y, _mm512_loadu_ps(key_page_.scale() + t), _mm512_set1_ps(centre_scores_[r + i]));
        if (job_.keys.offset)
          s = _mm512_fmadd_ps(_mm512_loadu_ps(key_page_.offset() + t), _mm512_set1_ps(integer_queries_.sum[r + i]), s);
        _mm512_storeu_ps(scores + (r + i) * size_ + t, s);
      }
  }

  template <std::size_t Rows, std::size_t Width>
  void integer_sums(std::size_t r, std::size_t tile, float* sums_out) {
    __m512i sums[Rows][Width];
    integer_values_.multiply<Rows, Width, false>(size_, rotated_width_ / kTile, tile, integer_weights_.row(r),
                                                 integer_weights_.row_bytes, sums);
    for (std::size_t i = 0; i < Rows; ++i)
      for (std::size_t w = 0; w < Width; ++w) {
        const std::size_t c = (tile + w) * kTile;
        const float scale = integer_weights_.scale[r + i];
        const float step = integer_values_.step(c) * scale, base = integer_values_.base(c) * scale;
        // base: Σ weights · middle level; sum: Σ p, for the centre; plus Σ p · offset
        float* to = sums_out + (r + i) * rotated_width_ + c;
        __m512 y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[i][w]), _mm512_set1_ps(step), _mm512_loadu_ps(to));
        y = _mm512_fmadd_ps(_mm512_loadu_ps(value_page_.centre() + c), _mm512_set1_ps(integer_weights_.sum[r + i]), y);
        _mm512_storeu_ps(to, _mm512_add_ps(y, _mm512_set1_ps(base * integer_weights_.base[r + i] + offsets_[r + i])));
      }
  }

  // Calls visit<Rows, Width>(row, tile) over `rows` rows and `tiles` tiles, in blocks that fit the registers.
  template <typename Visit>
  static void in_blocks(std::size_t rows, std::size_t tiles, Visit visit) {
    const auto wide = [&]<std::size_t Rows>(std::integral_constant<std::size_t, Rows> some, std::size_t r) {
      std::size_t t = 0;
      for (; t + 4 <= tiles; t += 4) visit(some, std::integral_constant<std::size_t, 4>{}, r, t);
      for (; t < tiles; ++t) visit(some, std::integral_constant<std::size_t, 1>{}, r, t);
    };
    std::size_t r = 0;
    for (; r + 4 <= rows; r += 4) wide(std::integral_constant<std::size_t, 4>{}, r);
    if (rows - r == 3) wide(std::integral_constant<std::size_t, 3>{}, r);
    if (rows - r == 2) wide(std::integral_constant<std::size_t, 2>{}, r);
    if (rows - r == 1) wide(std::integral_constant<std::size_t, 1>{}, r);
  }

  // `read` for a page, with integer products.
  void read_integers(State& state, const float* rotated_query, std::size_t batch, std::size_t head, std::size_t page,
                     std::int64_t start) {
    float* scores = scores_.data();
    integer_keys_.unpack(key_page_.find(batch, head, page));
    const std::size_t channels = job_.keys.shape.head_dim;
    for (std::size_t r = 0; r < count_; ++r) {
      centre_scores_[r] = 0;
      if (!job_.keys.centre) continue;
      Vec dot{};
      std::size_t c = 0;
      const std::size_t whole = job_.keys.centre_dim / kLanes * kLanes;
      for (; c < whole; c += kLanes) dot += load(rotated_query + r * channels + c) * load(key_page_.centre() + c);
      float rest = 0;
      for (; c < job_.keys.centre_dim; ++c) rest += rotated_query[r * channels + c] * key_page_.centre()[c];
      centre_scores_[r] = _mm512_reduce_add_ps(__m512(dot)) + rest;
    }
    in_blocks(count_, size_ / kTile, [&]<std::size_t Rows, std::size_t Width>(
                                         std::integral_constant<std::size_t, Rows>,
                                         std::integral_constant<std::size_t, Width>, std::size_t r, std::size_t t) {
      integer_scores<Rows, Width>(r, t, scores);
    });
    integer_values_.unpack(value_page_.find(batch, head, page));
    for (std::size_t r = 0; r < count_; ++r) {
      float* p = scores + r * size_;
      weigh(state, r, p, start, size_, size_, nullptr, job_.folded_stop);
      // Probabilities times token scales as u8 with a scale a row; Σ p and Σ p · offset besides.
      Vec most{}, total{}, offset{};
      for (std::size_t t = 0; t < size_; t += kLanes) {
        const Vec w = load(p + t);
        total += w;
        if (job_.values.offset) offset += w * load(value_page_.offset() + t);
        const Vec scaled = w * load(value_page_.scale() + t);
        store(p + t, scaled);
        most = scaled > most ? scaled : most;
      }
      const float largest_weight = _mm512_reduce_max_ps(__m512(most));
      const float inverse = largest_weight > 0 ? 255.0f / largest_weight : 0.0f;
      __m512i count = _mm512_setzero_si512();
      for (std::size_t t = 0; t < size_; t += kLanes) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(p + t), _mm512_set1_ps(inverse)));
        count = _mm512_add_epi32(count, whole);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(integer_weights_.row(r) + t), _mm512_cvtusepi32_epi8(whole));
      }
      integer_weights_.scale[r] = largest_weight / 255.0f;
      integer_weights_.base[r] = static_cast<float>(_mm512_reduce_add_epi32(count));
      integer_weights_.sum[r] = job_.values.centre ? _mm512_reduce_add_ps(__m512(total)) : 0.0f;
      offsets_[r] = _mm512_reduce_add_ps(__m512(offset));
    }
    in_blocks(count_, rotated_width_ / kTile, [&]<std::size_t Rows, std::size_t Width>(
                                                  std::integral_constant<std::size_t, Rows>,
                                                  std::integral_constant<std::size_t, Width>, std::size_t r,
                                                  std::size_t t) {
      integer_sums<Rows, Width>(r, t, state.rotated.data());
    });
  }
#endif

  // Scores of one row to unnormalised probabilities, in place; older sums are rescaled to match.
  void weigh(State& state, std::size_t r, float* scores, std::int64_t start, std::size_t tokens, std::size_t stride,
             const std::int64_t* starts, const std::int64_t* stops) const {
    const std::size_t q = query_of(r);
    if (job_.softcap != 0.0f)
      for (std::size_t t = 0; t < tokens; ++t) scores[t] = job_.softcap * std::tanh(scores[t] / job_.softcap);
    const auto clamp = [&](std::int64_t position) {
      return static_cast<std::size_t>(std::clamp<std::int64_t>(position - start, 0, static_cast<std::int64_t>(tokens)));
    };
    const std::size_t low = starts ? clamp(starts[q]) : 0, high = clamp(stops[q]);
    for (std::size_t t = 0; t < low; ++t) scores[t] = kNever;
    for (std::size_t t = high; t < stride; ++t) scores[t] = kNever;
    if (job_.mask) {
      const std::size_t head = head_ * job_.repeat + (first_ + r) / job_.queries;
      const std::uint8_t* mask = job_.mask + batch_ * job_.mask_batch + head * job_.mask_head + q * job_.mask_query;
      for (std::size_t t = low; t < high; ++t) {
        const std::int64_t position = start + static_cast<std::int64_t>(t);
        if (position >= job_.mask_columns || !mask[position]) scores[t] = kNever;
      }
    }
    Vec most = all(kNever);
    for (std::size_t t = 0; t < stride; t += kLanes) {
      const Vec s = load(scores + t);
      most = s > most ? s : most;
    }
    const float maximum = std::max(state.maximum[r], largest(most));
    if (maximum == kNever) {
      std::fill(scores, scores + stride, 0.0f);
      return;
    }
    Vec added{};
    for (std::size_t t = 0; t < stride; t += kLanes) {
      const Vec p = exp_vec(load(scores + t) - maximum);
      store(scores + t, p);
      added += p;
    }
    const float decay = state.maximum[r] == kNever ? 0.0f : std::exp(state.maximum[r] - maximum);
    state.total[r] = state.total[r] * decay + sum(added);
    if (decay != 1.0f) {
      for (std::size_t c = 0; c < rotated_width_; c += kLanes) {
        float* at = &state.rotated[r * rotated_width_ + c];
        store(at, load(at) * decay);
      }
      for (std::size_t c = 0; c < plain_width_; c += kLanes) {
        float* at = &state.plain[r * plain_width_ + c];
        store(at, load(at) * decay);
      }
    }
    state.maximum[r] = maximum;
  }

  const Attention& job_;
  Page key_page_, value_page_;
  std::size_t rotated_width_, plain_width_, size_;
  Buffer scores_, dense_key_, dense_value_;
#ifdef __AVX512VNNI__
  IntegerPage integer_keys_, integer_values_;
  IntegerRows integer_queries_, integer_weights_;
  bool integer_;
  Buffer centre_scores_{kRowBlock}, offsets_{kRowBlock};
#endif
  std::size_t batch_ = 0, head_ = 0, first_ = 0, count_ = 0;
};

}  // namespace

void attend(const Attention& job) {
  const std::size_t rows = job.repeat * job.queries, row_blocks = (rows + kRowBlock - 1) / kRowBlock;
  const std::size_t units = job.batch * job.kv_heads * row_blocks;
  std::size_t blocks = job.pages;
  for (std::size_t i = 0; i < job.span_count; ++i) blocks += Worker::blocks(job.spans[i]);
  // Few rows over a long context: split the context, so that every thread has work.
  const std::size_t threads = static_cast<std::size_t>(std::max(job.threads, 1));
  const std::size_t wanted = units >= 4 * threads ? 1 : (4 * threads + units - 1) / units;
  const std::size_t splits = threads == 1 ? 1 : std::clamp<std::size_t>(blocks / 4, 1, wanted);
  const std::size_t rotated_width = padded(job.values.shape.head_dim), plain_width = padded(job.value_dim);
  const std::unique_ptr<State[]> states(new State[units * splits]);

#pragma omp parallel num_threads(static_cast<int>(std::min(threads, units * splits)))
  {
    Worker worker(job);
#pragma omp for schedule(dynamic)
    for (std::size_t i = 0; i < units * splits; ++i) {
      const std::size_t unit = i / splits, split = i % splits;
      const std::size_t first = unit % row_blocks * kRowBlock, count = std::min(kRowBlock, rows - first);
      const std::size_t head = unit / row_blocks % job.kv_heads, batch = unit / row_blocks / job.kv_heads;
      states[i] = State(count, rotated_width, plain_width);
      worker.run(states[i], batch, head, first, count, blocks * split / splits, blocks * (split + 1) / splits);
    }
#pragma omp for schedule(static)
    for (std::size_t unit = 0; unit < units; ++unit) {
      const std::size_t first = unit % row_blocks * kRowBlock, count = std::min(kRowBlock, rows - first);
      const std::size_t base = unit / row_blocks * rows + first;
      for (std::size_t r = 0; r < count; ++r) {
        float maximum = kNever, total = 0;
        for (std::size_t s = 0; s < splits; ++s) maximum = std::max(maximum, states[unit * splits + s].maximum[r]);
        float* rotated = job.rotated + (base + r) * job.values.shape.head_dim;
        float* plain = job.plain + (base + r) * job.value_dim;
        std::fill(rotated, rotated + job.values.shape.head_dim, 0.0f);
        std::fill(plain, plain + job.value_dim, 0.0f);
        for (std::size_t s = 0; s < splits; ++s) {
          const State& part = states[unit * splits + s];
          if (part.maximum[r] == kNever) continue;
          const float weight = std::exp(part.maximum[r] - maximum);
          total += weight * part.total[r];
          for (std::size_t c = 0; c < job.values.shape.head_dim; ++c)
            rotated[c] += weight * part.rotated[r * rotated_width + c];
          for (std::size_t c = 0; c < job.value_dim; ++c) plain[c] += weight * part.plain[r * plain_width + c];
        }
        job.maximum[base + r] = maximum;
        job.total[base + r] = total;
      }
    }
  }
}

}  // namespace kvfold::KVFOLD_ISA
