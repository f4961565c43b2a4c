// Attention over folded pages and the dense tokens around them; the formula is in kvfold/attention/reference.py.
//
// Codes are multiplied as integers in registers where they fit (integer.h). Elsewhere pages are unfolded one at a time, in
// rotated coordinates, into scratch that stays in the cache of a core (page.h). Either way every query that shares a page
// reads it there, and memory sees the codes once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pack.h"

namespace kvfold {

enum class Dtype : int { float32, float16, bfloat16 };

inline std::size_t bytes_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

// The keys, or the values, of a layer's pages. Strides are in elements and lead from a batch row or head to the next;
// pages of a head follow each other, unless a sequence says where they are.
struct Side {
  const std::uint8_t* code = nullptr;
  std::size_t code_batch = 0, code_head = 0;
  PageShape shape{};  // head_dim: channels of a code, not of a vector; bits: null for pages of float16 numbers
  std::size_t page_bytes = 0;     // from the codes of one page to those of the next
  std::size_t skipped_bytes = 0;  // of each row of tiles: codes of channels beyond those that are read
  const float* lut = nullptr;
  std::size_t lut_stride = 0;
  bool unit_levels = false;    // whether the levels of a token are brought to length 1
  bool scaled_shifts = false;  // whether tokens' scales multiply the centre, and channels' scales the offsets
  // Of each token and group, (pages, page_size, groups); both, or offset alone, may be null. offset is float16.
  const void* scale = nullptr;
  Dtype scale_dtype = Dtype::float16;
  bool signed_scale = false;  // whether a scale may be negative
  const std::uint16_t* offset = nullptr;
  std::size_t scale_batch = 0, scale_head = 0, groups = 1;
  const std::uint8_t* group_of_tile = nullptr;  // of each 16 channels; null if there is one group
  // float16: of each page, (pages, centre_dim); may be null.
  const std::uint16_t *centre = nullptr, *channel_scale = nullptr;
  std::size_t centre_batch = 0, centre_head = 0, centre_dim = 0;
  // float16: channels after the coded ones, as they are, (pages, page_size, plain_dim); may be null.
  const std::uint16_t* plain = nullptr;
  std::size_t plain_batch = 0, plain_head = 0, plain_dim = 0;
};

// R of one side: kvfold/quant/transforms.py.
enum class RotationKind : int { matrix, order, hadamard };

struct Rotation {
  RotationKind kind = RotationKind::matrix;
  std::size_t dim = 0, code_dim = 0;
  const float* matrix = nullptr;   // matrix: (head, code_dim, dim); a stride of 0 shares it
  std::size_t matrix_head = 0;
  const float* inverse = nullptr;  // matrix: (dim, code_dim); null if R is orthogonal
  // An order of channels, (batch, head, dim); a stride of 0 shares it. Kind order: it is R. Kind matrix: if R is
  // orthogonal, it comes before the matrix; null for none.
  const std::int16_t* order = nullptr;
  std::size_t order_batch = 0, order_head = 0;
  const float* signs = nullptr;  // hadamard: (dim)
  const float* mix = nullptr;    // hadamard: (dim / power)², null if that is 1
  std::size_t power = 1;         // hadamard: the largest power of two that divides dim
};

// Dense tokens at consecutive positions, strides as above; a query reads those from its `start` to before its `stop`.
// If `start` is null, all queries read from the first token on.
struct Span {
  const void *key = nullptr, *value = nullptr;
  std::size_t key_head = 0, key_token = 0, value_head = 0, value_token = 0;
  Dtype dtype = Dtype::float32;
  std::int64_t first = 0;    // position of the first token
  std::size_t tokens = 0;
  const std::int64_t *start = nullptr, *stop = nullptr;  // positions, one of each a query
};

// One sequence: a batch row of a cache, or a request whose pages lie anywhere in a pool.
struct Sequence {
  std::size_t row = 0;  // its index in contiguous pages, the mask, and orders of channels
  std::size_t queries = 0;
  const void* query = nullptr;  // (kv_heads · repeat, queries, key_dim)
  void* out = nullptr;          // (kv_heads · repeat, queries, value_dim), of out_dtype
  std::size_t pages = 0;
  const std::int64_t* page_at = nullptr;  // each page's offset in bytes from the first; null: pages follow each other
  // For each query, the first position that it reads folded, and the one after the last. If `folded_start` is null, all queries
  // read from the first token on.
  const std::int64_t *folded_start = nullptr, *folded_stop = nullptr;
  const Span* spans = nullptr;
  std::size_t span_count = 0;
};

// Attention of sequences whose queries, keys and values are of one shape.
struct Attention {
  const Sequence* sequences = nullptr;
  std::size_t count = 0;
  std::size_t kv_heads = 0, repeat = 0, key_dim = 0, value_dim = 0;
  std::size_t query_head = 0, query_token = 0, out_head = 0, out_token = 0;
  Dtype query_dtype = Dtype::float32, out_dtype = Dtype::float32;
  float scaling = 1;
  Side keys, values;
  Rotation key_rotation, value_rotation;
  std::int64_t pages_first = 0;  // position of the first folded token
  // One byte a position, 0 where a query must not read; null for none. Strides in bytes, 0 to share.
  const std::uint8_t* mask = nullptr;
  std::size_t mask_batch = 0, mask_head = 0, mask_query = 0;
  std::int64_t mask_columns = 0;
  float softcap = 0;  // 0 for none
  int threads = 1;
  const float* sink_logits = nullptr;  // (kv_heads · repeat), or null
};

// The same body compiled for each instruction set; attend_impl.h.
// attend: false if some queries are not finite; their outputs are NaN. in_integers: whether `attend` multiplies a side's codes as integers.
namespace serial {
bool attend(const Attention& job);
bool in_integers(const Side& side);
}
namespace avx2 {
bool attend(const Attention& job);
bool in_integers(const Side& side);
}
namespace avx512 {
bool attend(const Attention& job);
bool in_integers(const Side& side);
}
namespace avx512vnni {
bool attend(const Attention& job);
bool in_integers(const Side& side);
}
namespace avx512vbmi {
bool attend(const Attention& job);
bool in_integers(const Side& side);
}

}  // namespace kvfold
