// Attention of many sequences at once, for engines that schedule requests. Each sequence has its pages anywhere in a pool, and
// its unfinished page and its first token dense in slots of side buffers. kvfold/attention/pool.py says what a query reads.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "attend.h"

namespace kvfold {

// A layer's pool and tails. Pages are read by `Sequence::page_at`.
struct PagedLayer {
  Side keys, values;
  Rotation key_rotation, value_rotation;
  std::size_t kv_heads = 0, repeat = 0, key_dim = 0, value_dim = 0;
  float scaling = 1, softcap = 0;
  const float* sink_logits = nullptr;
  Dtype dtype = Dtype::float32;  // of tails, queries, keys and values
  char *tail_keys = nullptr, *tail_values = nullptr;  // (slots, kv_heads, page_size, key_dim) and (…, value_dim)
  const char *first_keys = nullptr, *first_values = nullptr;  // (slots, kv_heads, key_dim) and (…, value_dim)
};

// (tokens, heads, dim) with strides in elements.
struct TokenRows {
  const char* at = nullptr;
  std::size_t token = 0, head = 0;
};

// One sequence's part of a step.
struct PagedRow {
  std::int64_t first;     // place of its first new token in the batch
  std::int64_t count;     // new tokens
  std::int64_t length;    // all its tokens
  std::int64_t tail;      // slot of the older tokens in the page that the first new token joins; -1 if there are none
  std::int64_t kept;      // page from which on new tokens are kept dense
  std::int64_t slots[2];  // of that page and the next; -1 if no token is in them
  std::int64_t dense_first;  // slot of its first token; -1 if that is read folded, as the others of its page
};

// A step, the same for all layers that share pages and tails.
class PagedStep {
 public:
  // `page_at` has `width` entries for each row.
  PagedStep(std::vector<PagedRow> rows, std::vector<std::int64_t> page_at, std::size_t width, std::size_t page_size)
      : rows_(std::move(rows)), page_at_(std::move(page_at)), width_(width), size_(static_cast<std::int64_t>(page_size)) {
    for (const PagedRow& row : rows_)
      for (std::int64_t t = row.length - row.count; t < row.length; ++t)
        starts_.push_back(t / size_ * size_), stops_.push_back(t + 1), folded_starts_.push_back(row.dense_first >= 0 ? 1 : 0);
  }

  // Attention by `kernel` into `out`, (tokens, heads, value_dim). New tokens that stay dense go to their slots. Where a row's keys
  // or values are not finite, its outputs are NaN; returns the numbers of these rows. Queries that are not finite make NaN, too.
  template <typename Kernel>
  std::vector<std::size_t> attend(const PagedLayer& layer, Kernel kernel, const TokenRows& query, const TokenRows& key, const TokenRows& value,
              float* out, int threads) const {
    const std::size_t item = bytes_of(layer.dtype), size = static_cast<std::size_t>(size_);
    const std::size_t key_slot = layer.kv_heads * size * layer.key_dim, value_slot = layer.kv_heads * size * layer.value_dim;
    std::vector<Sequence> sequences;
    std::vector<std::size_t> broken;
    std::vector<Span> spans(3 * rows_.size());
    std::size_t done = 0;
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const PagedRow& row = rows_[i];
      const auto first = static_cast<std::size_t>(row.first), tail = static_cast<std::size_t>(std::max<std::int64_t>(row.tail, 0));
      const std::int64_t before = row.length - row.count;
      const std::int64_t *start = &starts_[done], *stop = &stops_[done];
      const std::size_t wide = layer.kv_heads * layer.repeat * layer.value_dim;
      if (!finite(key, row, layer.kv_heads, layer.key_dim, layer.dtype) || !finite(value, row, layer.kv_heads, layer.value_dim, layer.dtype)) {
        broken.push_back(i);
        std::fill_n(out + first * wide, static_cast<std::size_t>(row.count) * wide, std::numeric_limits<float>::quiet_NaN());
        done += static_cast<std::size_t>(row.count);
        continue;
      }
      Sequence sequence;
      sequence.queries = static_cast<std::size_t>(row.count);
      sequence.query = query.at + first * query.token * item;
      sequence.out = out + first * wide;
      sequence.pages = static_cast<std::size_t>((row.length - 1) / size_);
      sequence.page_at = page_at_.data() + i * width_, sequence.folded_start = &folded_starts_[done], sequence.folded_stop = start;
      Span* own = &spans[3 * i];
      own[0] = {layer.tail_keys + tail * key_slot * item, layer.tail_values + tail * value_slot * item,
                size * layer.key_dim, layer.key_dim, size * layer.value_dim, layer.value_dim,
                layer.dtype, before / size_ * size_, static_cast<std::size_t>(before % size_), start, stop};
      own[1] = {key.at + first * key.token * item, value.at + first * value.token * item, key.head, key.token, value.head,
                value.token, layer.dtype, before, sequence.queries, start, stop};
      sequence.spans = own, sequence.span_count = 2;
      if (row.dense_first >= 0 && sequence.pages) {  // read by those queries that read its page folded
        const std::size_t slot = static_cast<std::size_t>(row.dense_first) * layer.kv_heads;
        own[2] = {layer.first_keys + slot * layer.key_dim * item, layer.first_values + slot * layer.value_dim * item,
                  layer.key_dim, 0, layer.value_dim, 0, layer.dtype, 0, 1, nullptr, start};
        sequence.span_count = 3;
      }
      sequences.push_back(sequence);
      done += sequence.queries;
    }
    Attention job;
    job.sequences = sequences.data(), job.count = sequences.size();
    job.kv_heads = layer.kv_heads, job.repeat = layer.repeat, job.key_dim = layer.key_dim, job.value_dim = layer.value_dim;
    job.query_head = query.head, job.query_token = query.token, job.query_dtype = layer.dtype;
    job.out_head = layer.value_dim, job.out_token = layer.kv_heads * layer.repeat * layer.value_dim;
    job.keys = layer.keys, job.values = layer.values;
    job.key_rotation = layer.key_rotation, job.value_rotation = layer.value_rotation;
    job.scaling = layer.scaling, job.softcap = layer.softcap, job.sink_logits = layer.sink_logits, job.threads = threads;
    if (job.count) kernel(job);
    keep(key, layer.tail_keys, layer.kv_heads, layer.key_dim * item, item);
    keep(value, layer.tail_values, layer.kv_heads, layer.value_dim * item, item);
    return broken;
  }

 private:
  // Whether a row's new keys or values are finite.
  static bool finite(const TokenRows& from, const PagedRow& row, std::size_t heads, std::size_t dim, Dtype dtype) {
    for (std::int64_t t = 0; t < row.count; ++t)
      for (std::size_t head = 0; head < heads; ++head) {
        const std::size_t at = static_cast<std::size_t>(row.first + t) * from.token + head * from.head;
        const char* numbers = from.at + at * bytes_of(dtype);
        if (dtype == Dtype::float32 ? !no_full_exponent<std::uint32_t>(numbers, dim, 0x7f800000u)
                                    : !no_full_exponent<std::uint16_t>(numbers, dim, dtype == Dtype::float16 ? 0x7c00u : 0x7f80u))
          return false;
      }
    return true;
  }

  // Whether no number has all bits of its exponent, as an infinity and a NaN do.
  template <typename Bits>
  static bool no_full_exponent(const char* numbers, std::size_t count, Bits exponent) {
    const auto* bits = reinterpret_cast<const Bits*>(numbers);
    bool found = false;
    for (std::size_t i = 0; i < count; ++i) found |= (bits[i] & exponent) == exponent;
    return !found;
  }

  // Copies new tokens that stay dense into their slots.
  void keep(const TokenRows& from, char* tails, std::size_t heads, std::size_t bytes, std::size_t item) const {
    for (const PagedRow& row : rows_) {
      const std::int64_t before = row.length - row.count;
      for (std::int64_t t = std::max(row.kept * size_, before); t < row.length; ++t)
        for (std::size_t head = 0; head < heads; ++head) {
          const auto token = static_cast<std::size_t>(row.first + t - before);
          const auto slot = static_cast<std::size_t>(row.slots[t / size_ - row.kept]);
          char* to = tails + ((slot * heads + head) * static_cast<std::size_t>(size_) + static_cast<std::size_t>(t % size_)) * bytes;
          std::memcpy(to, from.at + (token * from.token + head * from.head) * item, bytes);
        }
    }
  }

  std::vector<PagedRow> rows_;
  std::vector<std::int64_t> page_at_;
  std::size_t width_;
  std::int64_t size_;
  // Of each query: the start of its own page, its end of reading, and where it begins to read folded tokens.
  std::vector<std::int64_t> starts_, stops_, folded_starts_;
};

}  // namespace kvfold
