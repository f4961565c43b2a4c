// Attention over batch rows of one length, as kvfold/attention/cpu/rows.py asks for it.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "sides.h"
#include "tensors.h"

namespace {

// Keys and values (batch, heads, tokens, dim) at consecutive positions: which token is the first, its position, and how many.
using GivenSpan = std::tuple<nb::object, nb::object, std::size_t, std::int64_t, std::size_t>;
// One byte a position: the address, strides in bytes from row to row, head to head and query to query, and how many
// positions.
using MaskAt = std::tuple<std::uintptr_t, std::size_t, std::size_t, std::size_t, std::int64_t>;

// Lowers each query's stop to the end of what a mask lets it see in any row or head. Returns whether that is all that the mask
// says, as for causal ones.
bool stops(const MaskAt& mask, std::size_t batch, std::size_t heads, std::vector<std::int64_t>& stop) {
  const auto [at, by_row, by_head, by_query, columns] = mask;
  bool all = true;
  for (std::size_t q = 0; q < stop.size(); ++q) {
    const std::int64_t most = std::min(stop[q], columns);
    std::int64_t last = -1;
    for (std::size_t row = 0; row < (by_row ? batch : 1); ++row)
      for (std::size_t head = 0; head < (by_head ? heads : 1); ++head) {
        const auto* seen = pointer<std::uint8_t>(at) + row * by_row + head * by_head + q * by_query;
        std::int64_t own = most;
        for (std::uint64_t eight; own >= 8 && (std::memcpy(&eight, seen + own - 8, 8), !eight);) own -= 8;
        while (own && !seen[own - 1]) --own;
        all = all && (last < 0 || own == last) && !std::memchr(seen, 0, static_cast<std::size_t>(own));
        last = std::max(last, own);
      }
    stop[q] = last;
  }
  return all;
}

// Batch rows that hold equally many tokens, as attention reads them while none of their tensors moves. `read`: all tensors that
// the sides and rotations point to.
struct Rows : kvfold::Addresses {
  Kernels kernels;
  OwnedSide own_keys, own_values;  // the sides' tables of bits and groups
  kvfold::Attention common;
  std::size_t page_rows;  // batch rows of pages; 0 if there are no pages
  Rows(const std::string& isa, const OwnedSide& key_side, const OwnedSide& value_side, const kvfold::Rotation& of_keys,
       const kvfold::Rotation& of_values, std::size_t rows, std::size_t heads, std::size_t key_channels, std::size_t value_channels,
       std::int64_t pages_first, std::vector<nb::object> read)
      : Addresses(std::move(read)), kernels(find(isa)), own_keys(key_side), own_values(value_side), page_rows(rows) {
    common.keys = own_keys.view(), common.values = own_values.view();
    common.key_rotation = of_keys, common.value_rotation = of_values, common.pages_first = pages_first;
    common.kv_heads = heads, common.key_dim = key_channels, common.value_dim = value_channels;
  }
  Rows(const Rows&) = delete;  // its sides point into it

  // Dense tokens at consecutive positions. from_first: whether a query reads them all, or only those after its last folded one.
  struct Given {
    kvfold::Numbered key, value;
    std::size_t place;
    std::int64_t first;
    std::size_t tokens;
    bool from_first;
  };

  // `reach`: positions up to which each query reads folded tokens, then those up to which it reads any. `outs` has the queries'
  // dtype. Returns whether queries are finite; nullopt, without output, if a tensor does not fit or cannot be used in place.
  std::optional<bool> attend(nb::handle queries, nb::handle outs, float scaling, std::size_t pages,
                             const std::vector<std::int64_t>& reach, const std::optional<GivenSpan>& sinks,
                             const std::optional<GivenSpan>& dense, const std::optional<MaskAt>& mask, float softcap,
                             std::uintptr_t sink_logits, int threads) const {
    const auto given = as_given(sinks, dense);
    if (!given) return {};
    return attend(queries, outs, scaling, pages, reach, *given, mask, softcap, sink_logits, threads);
  }

  // nullopt if kernels cannot use a tensor in place.
  static std::optional<std::vector<Given>> as_given(const std::optional<GivenSpan>& sinks, const std::optional<GivenSpan>& dense) {
    std::vector<Given> given;
    for (const auto* span : {&sinks, &dense}) {
      if (!*span) continue;
      const auto& [keys, values, place, first, tokens] = **span;
      const auto key = kvfold::numbers_of(keys), value = kvfold::numbers_of(values);
      if (!key || !value) return {};
      given.push_back({*key, *value, place, first, tokens, span == &sinks});
    }
    return given;
  }

  std::optional<bool> attend(nb::handle queries, nb::handle outs, float scaling, std::size_t pages,
                             const std::vector<std::int64_t>& reach, const std::vector<Given>& given,
                             const std::optional<MaskAt>& mask, float softcap, std::uintptr_t sink_logits, int threads) const {
    const auto query = kvfold::numbers_of(queries), out = kvfold::numbers_of(outs);
    if (!query || !out || out->dtype != query->dtype) return {};
    const auto [batch, heads, n, dim] = query->shape;
    const std::size_t repeat = heads / common.kv_heads;
    if (!repeat || heads != repeat * common.kv_heads || dim != common.key_dim || n != reach.size() / 2) return {};
    if (!out->has_shape(batch, heads, n, common.value_dim) || (page_rows && batch != page_rows)) return {};
    const std::int64_t* folded_until = reach.data();
    std::vector<std::int64_t> stop(folded_until + n, folded_until + 2 * n), folded_stop;
    const bool hides_more = mask && !stops(*mask, batch, heads, stop);
    for (std::size_t i = 0; i < n; ++i) folded_stop.push_back(std::min(folded_until[i], stop[i]));

    kvfold::Attention job = common;
    job.query_head = query->head, job.query_token = query->token, job.scaling = scaling;
    job.query_dtype = job.out_dtype = query->dtype;
    job.repeat = repeat, job.softcap = softcap, job.sink_logits = pointer<float>(sink_logits), job.threads = threads;
    job.out_head = out->head, job.out_token = out->token;
    if (hides_more) {
      const auto [at, by_row, by_head, by_query, columns] = *mask;
      job.mask = pointer<std::uint8_t>(at), job.mask_batch = by_row, job.mask_head = by_head, job.mask_query = by_query;
      job.mask_columns = columns;
    }
    std::vector<kvfold::Span> spans;
    for (const auto& [key, value, place, first, tokens, from_first] : given) {
      if (key.dtype != value.dtype || place + tokens > std::min(key.shape[2], value.shape[2])) return {};
      if (!key.has_shape(batch, common.kv_heads, key.shape[2], dim)) return {};
      if (!value.has_shape(batch, common.kv_heads, value.shape[2], common.value_dim)) return {};
    }
    for (std::size_t row = 0; row < batch; ++row)
      for (const auto& [key, value, place, first, tokens, from_first] : given)
        spans.push_back({key.at(row, place), value.at(row, place), key.head, key.token, value.head, value.token, key.dtype, first,
                         tokens, from_first ? nullptr : folded_until, stop.data()});
    std::vector<kvfold::Sequence> sequences;
    for (std::size_t row = 0; row < batch; ++row)
      sequences.push_back({row, n, query->at(row, 0), const_cast<void*>(out->at(row, 0)), pages, nullptr, nullptr, folded_stop.data(),
                           spans.data() + row * given.size(), given.size()});
    job.sequences = sequences.data(), job.count = batch;
    nb::gil_scoped_release release;
    return kernels.attend(job);
  }
};

}  // namespace
