// Attention over folded pages and the dense tokens around them; the formula is in kvfold/attention/reference.py.
//
// Pages are unfolded one at a time, in rotated coordinates, into scratch that stays in the cache of a core, and read
// there by every query that shares them. Memory sees the codes, once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pack.h"

namespace kvfold {

// The keys, or the values, of a layer's pages. Strides are in elements and lead from a batch row or head to the next;
// pages of a head follow each other.
struct Side {
  const std::uint8_t* code = nullptr;
  std::size_t code_batch = 0, code_head = 0;
  PageShape shape{};  // head_dim is the width of a code; bits is null for pages of float16 numbers
  const float* lut = nullptr;
  std::size_t lut_stride = 0;
  // float16: of each token and group, (pages, page_size, groups); both, or offset alone, may be null.
  const std::uint16_t *scale = nullptr, *offset = nullptr;
  std::size_t scale_batch = 0, scale_head = 0, groups = 1;
  // float16: of each page, (pages, centre_dim); may be null.
  const std::uint16_t *centre = nullptr, *channel_scale = nullptr;
  std::size_t centre_batch = 0, centre_head = 0, centre_dim = 0;
};

enum class Dtype : int { float32, float16, bfloat16 };

// Dense tokens at consecutive positions, strides as above; a query reads those from its `start` to before its `stop`.
struct Span {
  const void *key = nullptr, *value = nullptr;
  std::size_t key_batch = 0, key_head = 0, key_token = 0, value_batch = 0, value_head = 0, value_token = 0;
  Dtype dtype = Dtype::float32;
  std::int64_t first = 0;    // position of the first token
  std::size_t tokens = 0;
  const std::int64_t *start = nullptr, *stop = nullptr;  // positions, one of each a query
};

struct Attention {
  std::size_t batch = 0, kv_heads = 0, repeat = 0, queries = 0, key_dim = 0, value_dim = 0;
  const float* rotated_query = nullptr;  // (batch, kv_heads, repeat, queries, keys.shape.head_dim)
  const float* query = nullptr;          // (batch, kv_heads, repeat, queries, key_dim)
  std::size_t pages = 0;
  Side keys, values;
  std::int64_t pages_first = 0;               // position of the first folded token
  const std::int64_t* folded_stop = nullptr;  // for each query, the position after the last that it reads folded
  const Span* spans = nullptr;
  std::size_t span_count = 0;
  // One byte a position, 0 where a query must not look; null for none. Strides in bytes, 0 to share.
  const std::uint8_t* mask = nullptr;
  std::size_t mask_batch = 0, mask_head = 0, mask_query = 0;
  std::int64_t mask_columns = 0;
  float softcap = 0;  // 0 for none
  int threads = 1;
  // Unnormalised sums, and the logarithm's two parts, for each query row.
  float* rotated = nullptr;  // (rows, values.shape.head_dim)
  float* plain = nullptr;    // (rows, value_dim)
  float* maximum = nullptr;  // (rows)
  float* total = nullptr;    // (rows)
};

// The same body compiled for each instruction set; attend_impl.h.
namespace serial {
void attend(const Attention& job);
}
namespace avx2 {
void attend(const Attention& job);
}
namespace avx512 {
void attend(const Attention& job);
}
namespace avx512vnni {
void attend(const Attention& job);
}
namespace avx512vbmi {
void attend(const Attention& job);
}

}  // namespace kvfold
