// Python bindings of the CPU kernels. Tensors cross as DLPack, whose shapes are checked, or as addresses and strides, of which
// the caller answers for.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attend.h"
#include "channelwise.h"
#include "copy.h"
#include "fold.h"
#include "pack.h"
#include "paged.h"
#include "tensors.h"

namespace nb = nanobind;
using Bytes = nb::ndarray<std::uint8_t, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using Halves = nb::ndarray<std::uint16_t, nb::c_contig, nb::device::cpu>;
using ConstFloats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;

namespace {

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

struct Job {
  kvfold::PageShape shape;
  std::size_t pages;
};

// `codes_shape` is that of the unpacked side, (pages, P, D); `packed_bytes` that of the packed side.
template <typename Codes>
Job check(const Codes& codes, std::size_t packed_bytes, const nb::bytes& bits, bool lanes_are_tokens) {
  require(codes.ndim() == 3, "codes must have the shape (pages, page_size, head_dim)");
  Job job{{codes.shape(1), codes.shape(2), reinterpret_cast<const std::uint8_t*>(bits.c_str()),
           lanes_are_tokens},
          codes.shape(0)};
  require(job.shape.page_size % kvfold::kTile == 0, "page_size must be a multiple of 16");
  require(bits.size() == (job.shape.head_dim + kvfold::kTile - 1) / kvfold::kTile,
          "bits must have one entry for each group of 16 channels");
  for (std::size_t i = 0; i < bits.size(); ++i)
    require(job.shape.bits[i] >= 1 && job.shape.bits[i] <= 8, "bits must be 1 to 8");
  require(packed_bytes == job.pages * job.shape.code_bytes(), "packed must have page_size * 2 * sum(bits) bytes a page");
  return job;
}

void pack(ConstBytes codes, Bytes packed, nb::bytes bits, bool lanes_are_tokens) {
  const Job job = check(codes, packed.size(), bits, lanes_are_tokens);
  nb::gil_scoped_release release;
  kvfold::serial::pack(codes.data(), packed.data(), job.pages, job.shape);
}

void unpack(ConstBytes packed, Bytes codes, nb::bytes bits, bool lanes_are_tokens) {
  const Job job = check(codes, packed.size(), bits, lanes_are_tokens);
  nb::gil_scoped_release release;
  kvfold::serial::unpack(packed.data(), codes.data(), job.pages, job.shape);
}

void unpack_levels(ConstBytes packed, ConstFloats lut, Floats levels, nb::bytes bits, bool lanes_are_tokens) {
  const Job job = check(levels, packed.size(), bits, lanes_are_tokens);
  require(lut.ndim() == 2 && lut.shape(0) == bits.size(), "lut must have one row for each group of 16 channels");
  for (std::size_t i = 0; i < bits.size(); ++i)
    require(lut.shape(1) >= (std::size_t{1} << job.shape.bits[i]), "lut must have 2^bits levels a group");
  nb::gil_scoped_release release;
  kvfold::serial::unpack_levels(packed.data(), lut.data(), lut.shape(1), levels.data(), job.pages, job.shape);
}

template <typename T>
const T* pointer(std::uintptr_t address) {
  return reinterpret_cast<const T*>(address);
}

// A kvfold::Side that owns its bits and groups. Addresses and strides are those of torch tensors, which the caller keeps alive
// and whose shapes it has checked.
struct OwnedSide : kvfold::Side {
  std::string own_bits, own_groups;
  std::size_t row_bytes = 0;  // of 16 tokens
  OwnedSide(std::uintptr_t code_at, std::size_t code_batch_stride, std::size_t code_head_stride, std::size_t page_size,
            std::size_t code_dim, nb::bytes bits, bool lanes_are_tokens, std::uintptr_t lut_at, std::size_t lut_row,
            bool levels_are_unit)
      : own_bits(bits.c_str(), bits.size()) {
    code = pointer<std::uint8_t>(code_at);
    code_batch = code_batch_stride, code_head = code_head_stride;
    shape.page_size = page_size, shape.head_dim = code_dim, shape.lanes_are_tokens = lanes_are_tokens;
    lut = pointer<float>(lut_at), lut_stride = lut_row, unit_levels = levels_are_unit;
    for (const char b : own_bits) row_bytes += 32 * static_cast<std::size_t>(b);
    page_bytes = own_bits.empty() ? 2 * page_size * code_dim : page_size / kvfold::kTile * row_bytes;
  }
  // Reads the first channels only, of codes whose lanes are tokens.
  void set_first_channels(std::size_t code_dim) {
    const std::size_t tiles = (code_dim + kvfold::kTile - 1) / kvfold::kTile;
    require(shape.lanes_are_tokens && tiles <= own_bits.size(), "only the first channels of keys can be read");
    for (std::size_t i = tiles; i < own_bits.size(); ++i) skipped_bytes += 32 * static_cast<std::size_t>(own_bits[i]);
    own_bits.resize(tiles), shape.head_dim = code_dim;
  }
  void set_scale(std::uintptr_t scale_at, int dtype, bool is_signed, std::uintptr_t offset_at, std::size_t batch,
                 std::size_t head, std::size_t n, nb::bytes group_of_each_tile) {
    scale = pointer<void>(scale_at), offset = pointer<std::uint16_t>(offset_at);
    scale_dtype = static_cast<kvfold::Dtype>(dtype), signed_scale = is_signed;
    scale_batch = batch, scale_head = head, groups = n;
    own_groups.assign(group_of_each_tile.c_str(), group_of_each_tile.size());
  }
  void set_plain(std::uintptr_t at, std::size_t batch, std::size_t head, std::size_t dim) {
    plain = pointer<std::uint16_t>(at), plain_batch = batch, plain_head = head, plain_dim = dim;
  }
  void set_centre(std::uintptr_t centre_at, std::uintptr_t channel_scale_at, std::size_t batch, std::size_t head,
                  std::size_t dim) {
    centre = pointer<std::uint16_t>(centre_at), channel_scale = pointer<std::uint16_t>(channel_scale_at);
    centre_batch = batch, centre_head = head, centre_dim = dim;
  }
  kvfold::Side view() const {
    const std::size_t tiles = (shape.head_dim + kvfold::kTile - 1) / kvfold::kTile;
    require(groups == 1 || own_groups.size() >= tiles, "every 16 channels must have a scale group");
    require(centre_dim <= tiles * kvfold::kTile, "centres must not be wider than codes");
    kvfold::Side side = *this;
    side.shape.bits = own_bits.empty() ? nullptr : reinterpret_cast<const std::uint8_t*>(own_bits.data());
    if (groups > 1) side.group_of_tile = reinterpret_cast<const std::uint8_t*>(own_groups.data());
    return side;
  }
};

// The instruction sets that this machine runs, best first.
std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi")) names.push_back("avx512vbmi");
    if (__builtin_cpu_supports("avx512vnni")) names.push_back("avx512vnni");
    names.push_back("avx512");
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) names.push_back("avx2");
#endif
  names.push_back("serial");
  return names;
}

// What is compiled for each instruction set.
struct Kernels {
  bool (*attend)(const kvfold::Attention&);
  bool (*in_integers)(const kvfold::Side&);
  void (*fold_channelwise)(const kvfold::Channelwise&);
  void (*fold)(const kvfold::Fold&);
  bool (*copy)(const kvfold::Copy&);
};

const Kernels& find(const std::string& isa) {
  static const std::map<std::string, Kernels> known = [] {
    using namespace kvfold;
    std::map<std::string, Kernels> all;
    for (const std::string& name : instruction_sets()) {
#if defined(__x86_64__)
      namespace wide = avx512;
      if (name == "avx512vbmi")
        all[name] = {avx512vbmi::attend, avx512vbmi::in_integers, wide::fold_channelwise, wide::fold, wide::copy};
      if (name == "avx512vnni")
        all[name] = {avx512vnni::attend, avx512vnni::in_integers, wide::fold_channelwise, wide::fold, wide::copy};
      if (name == "avx512") all[name] = {wide::attend, wide::in_integers, wide::fold_channelwise, wide::fold, wide::copy};
      if (name == "avx2") all[name] = {avx2::attend, avx2::in_integers, avx2::fold_channelwise, avx2::fold, avx2::copy};
#endif
      if (name == "serial")
        all[name] = {serial::attend, serial::in_integers, serial::fold_channelwise, serial::fold, serial::copy};
    }
    return all;
  }();
  const auto found = known.find(isa);
  if (found != known.end()) return found->second;
  throw std::invalid_argument("this machine does not run " + isa);
}

// `batch`, `heads`, `pages` and `channels` are known from the shape of `centre`; strides in elements.
void fold_channelwise(const std::string& isa, std::uintptr_t x, int dtype, std::size_t x_batch, std::size_t x_head,
                      std::size_t x_token, std::size_t page_size, std::uintptr_t order, std::size_t order_batch,
                      std::size_t order_head, ConstFloats lut, nb::bytes bits, std::size_t steps, bool lanes_are_tokens,
                      Bytes code, Halves centre, Halves scale, int threads) {
  require(centre.ndim() == 4 && lut.ndim() == 2, "centre must have the shape (batch, heads, pages, channels), lut (groups, levels)");
  kvfold::Channelwise job;
  job.x = pointer<void>(x), job.dtype = static_cast<kvfold::Dtype>(dtype);
  job.x_batch = x_batch, job.x_head = x_head, job.x_token = x_token;
  job.batch = centre.shape(0), job.heads = centre.shape(1), job.pages = centre.shape(2), job.channels = centre.shape(3);
  job.page_size = page_size, job.steps = steps, job.lanes_are_tokens = lanes_are_tokens, job.threads = threads;
  job.order = pointer<std::int16_t>(order), job.order_batch = order_batch, job.order_head = order_head;
  require(page_size && page_size % kvfold::kTile == 0, "page_size must be a multiple of 16");
  require(steps >= 1, "steps must be at least 1");
  require(bits.size() == (job.channels + kvfold::kTile - 1) / kvfold::kTile && lut.shape(0) == bits.size(),
          "bits and lut must have one entry for each group of 16 channels");
  job.bits = reinterpret_cast<const std::uint8_t*>(bits.c_str());
  std::size_t all_bits = 0;
  for (std::size_t i = 0; i < bits.size(); ++i) {
    require(job.bits[i] >= 1 && job.bits[i] <= 8 && lut.shape(1) >= (std::size_t{1} << job.bits[i]),
            "bits must be 1 to 8, and lut have 2^bits levels a group");
    all_bits += job.bits[i];
  }
  const std::size_t pages = job.batch * job.heads * job.pages;
  require(code.size() == pages * page_size * 2 * all_bits, "code must have page_size * 2 * sum(bits) bytes a page");
  require(scale.size() == centre.size(), "scale must have the shape of centre");
  job.lut = lut.data(), job.lut_stride = lut.shape(1), job.code = code.data();
  job.centre = centre.data(), job.scale = scale.data();
  const auto run = find(isa).fold_channelwise;
  nb::gil_scoped_release release;
  run(job);
}

// kvfold::Rotation over tensors that the caller keeps alive.
kvfold::Rotation matrix_rotation(std::size_t dim, std::size_t code_dim, std::uintptr_t matrix, std::uintptr_t inverse) {
  kvfold::Rotation r;
  r.kind = kvfold::RotationKind::matrix, r.dim = dim, r.code_dim = code_dim;
  r.matrix = pointer<float>(matrix), r.inverse = pointer<float>(inverse);
  return r;
}

kvfold::Rotation order_rotation(std::size_t dim, std::uintptr_t order, std::size_t batch, std::size_t head) {
  kvfold::Rotation r;
  r.kind = kvfold::RotationKind::order, r.dim = r.code_dim = dim;
  r.order = pointer<std::int16_t>(order), r.order_batch = batch, r.order_head = head;
  return r;
}

kvfold::Rotation ordered_matrix_rotation(std::size_t dim, std::uintptr_t order, std::size_t batch, std::size_t head,
                                         std::uintptr_t matrix) {
  kvfold::Rotation r = order_rotation(dim, order, batch, head);
  r.kind = kvfold::RotationKind::matrix, r.matrix = pointer<float>(matrix);
  return r;
}

kvfold::Rotation hadamard_rotation(std::size_t dim, std::uintptr_t signs, std::uintptr_t mix) {
  kvfold::Rotation r;
  r.kind = kvfold::RotationKind::hadamard, r.dim = r.code_dim = dim, r.power = dim & (~dim + 1);
  r.signs = pointer<float>(signs), r.mix = pointer<float>(mix);
  return r;
}

// `batch`, `heads` and `pages` are known from the shape of `scale`; strides of x in elements.
void fold(const std::string& isa, std::uintptr_t x, int dtype, std::size_t x_batch, std::size_t x_head, std::size_t x_token,
          std::size_t tokens, std::size_t first, const kvfold::Rotation& rotation, ConstFloats levels, int rule,
          bool lanes_are_tokens, Bytes code, Halves scale, std::optional<Halves> centre, int threads) {
  require(scale.ndim() == 4 && levels.ndim() == 1, "scale must have the shape (batch, heads, pages, page_size)");
  kvfold::Fold job;
  job.x = pointer<void>(x), job.dtype = static_cast<kvfold::Dtype>(dtype), job.tokens = tokens, job.first = first;
  job.x_batch = x_batch, job.x_head = x_head, job.x_token = x_token;
  job.batch = scale.shape(0), job.heads = scale.shape(1), job.pages = scale.shape(2);
  job.shape.page_size = scale.shape(3), job.shape.head_dim = rotation.code_dim;
  job.shape.lanes_are_tokens = lanes_are_tokens;
  job.rotation = rotation, job.levels = levels.data(), job.rule = static_cast<kvfold::ScaleRule>(rule);
  while ((std::size_t{1} << job.bits) < levels.size()) ++job.bits;
  require(job.bits >= 1 && job.bits <= 8 && levels.size() == std::size_t{1} << job.bits, "levels must be 2 to 256, a power of two");
  require(job.shape.page_size % kvfold::kTile == 0, "page_size must be a multiple of 16");
  require(first < job.shape.page_size && first + tokens <= job.pages * job.shape.page_size, "x must fit the pages");
  const std::size_t pages = job.batch * job.heads * job.pages;
  const std::size_t tiles = (rotation.code_dim + kvfold::kTile - 1) / kvfold::kTile;
  require(code.size() == pages * job.shape.page_size * 2 * job.bits * tiles, "code must have page_size * 2 * sum(bits) bytes a page");
  job.centred = centre.has_value(), job.code = code.data(), job.scale = scale.data(), job.threads = threads;
  if (centre) {
    require(centre->size() == pages * rotation.code_dim, "centre must have code_dim numbers a page");
    require(first == 0 && tokens == job.pages * job.shape.page_size, "pages with a centre must be whole");
    job.centre = centre->data();
  }
  const auto run = find(isa).fold;
  nb::gil_scoped_release release;
  run(job);
}

// Keys and values (batch, heads, tokens, dim) at consecutive positions: which token is the first, its position, and how many.
using GivenSpan = std::tuple<nb::object, nb::object, std::size_t, std::int64_t, std::size_t>;
// One byte a position: strides in bytes from row to row, head to head and query to query, and how many positions.
using MaskAt = std::tuple<std::uintptr_t, std::size_t, std::size_t, std::size_t, std::int64_t>;

// Brings down where each query stops to the last position that a mask lets it see anywhere. Whether that is all that the mask says, as
// for causal ones.
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

// Batch rows that hold equally many tokens, as attention reads them while nothing of theirs moves: the `read` are all that the
// sides and rotations point to.
struct Rows : kvfold::Addresses {
  Kernels kernels;
  OwnedSide own_keys, own_values;  // the sides' tables of bits and groups
  kvfold::Attention common;
  std::size_t page_rows;  // of pages; 0 if there are none
  Rows(const std::string& isa, const OwnedSide& key_side, const OwnedSide& value_side, const kvfold::Rotation& of_keys,
       const kvfold::Rotation& of_values, std::size_t rows, std::size_t heads, std::size_t key_channels, std::size_t value_channels,
       std::int64_t pages_first, std::vector<nb::object> read)
      : Addresses(std::move(read)), kernels(find(isa)), own_keys(key_side), own_values(value_side), page_rows(rows) {
    common.keys = own_keys.view(), common.values = own_values.view();
    common.key_rotation = of_keys, common.value_rotation = of_values, common.pages_first = pages_first;
    common.kv_heads = heads, common.key_dim = key_channels, common.value_dim = value_channels;
  }
  Rows(const Rows&) = delete;  // its sides point into it

  // Dense tokens at consecutive positions, and whether they are read from the first on, or from where a query stops to read folded ones.
  struct Given {
    kvfold::Numbered key, value;
    std::size_t place;
    std::int64_t first;
    std::size_t tokens;
    bool from_first;
  };

  // `reach`: positions that each query reads folded up to, and reads up to at all. `outs` has the queries' dtype. Whether the queries
  // are finite; none, and no output, if kernels do not take a tensor as it lies or one does not fit.
  std::optional<bool> attend(nb::handle queries, nb::handle outs, float scaling, std::size_t pages,
                             const std::vector<std::int64_t>& reach, const std::optional<GivenSpan>& sinks,
                             const std::optional<GivenSpan>& dense, const std::optional<MaskAt>& mask, float softcap,
                             std::uintptr_t sink_logits, int threads) const {
    std::vector<Given> given;
    for (const auto* span : {&sinks, &dense}) {
      if (!*span) continue;
      const auto& [keys, values, place, first, tokens] = **span;
      const auto key = kvfold::numbers_of(keys), value = kvfold::numbers_of(values);
      if (!key || !value) return {};
      given.push_back({*key, *value, place, first, tokens, span == &sinks});
    }
    return attend(queries, outs, scaling, pages, reach, given, mask, softcap, sink_logits, threads);
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
      sequences.push_back({row, n, query->at(row, 0), const_cast<void*>(out->at(row, 0)), pages, nullptr, folded_stop.data(),
                           spans.data() + row * given.size(), given.size()});
    job.sequences = sequences.data(), job.count = batch;
    nb::gil_scoped_release release;
    return kernels.attend(job);
  }
};

// Copies each tensor (batch, heads, tokens, dim) into another from its token `first` on. Whether all numbers are finite there; none,
// and nothing written, if kernels do not take a tensor as it lies or one does not fit.
std::optional<bool> copy(const std::string& isa, const std::vector<std::pair<nb::object, nb::object>>& tensors, std::size_t first) {
  std::vector<kvfold::Copy> jobs;
  for (const auto& [from, to] : tensors) {
    const auto source = kvfold::numbers_of(from), target = kvfold::numbers_of(to);
    if (!source || !target) return {};
    const auto [batch, heads, tokens, dim] = source->shape;
    if (!target->has_shape(batch, heads, target->shape[2], dim) || first + tokens > target->shape[2]) return {};
    kvfold::Numbers room = *target;
    room.data = target->at(0, first);
    jobs.push_back({*source, room, batch, heads, tokens, dim});
  }
  bool finite = true;
  for (const kvfold::Copy& job : jobs) finite &= find(isa).copy(job);
  return finite;
}

// Pages of one side of a stream whose tokens fold one by one: how a token is coded, and where pages are, with strides in bytes
// of codes and in numbers of scales. Addresses and strides are those of torch tensors that the caller keeps alive.
struct TokenSide {
  kvfold::Fold fold;  // of 16 slots
  std::uint8_t* code;
  std::uint16_t* scale;
  std::size_t page_size, code_batch, code_head, scale_batch, scale_head;
  TokenSide(const kvfold::Rotation& rotation, std::uintptr_t levels, unsigned bits, int rule, bool lanes_are_tokens,
            std::size_t slots, std::uintptr_t code_at, std::size_t code_batch_stride, std::size_t code_head_stride,
            std::uintptr_t scale_at, std::size_t scale_batch_stride, std::size_t scale_head_stride)
      : code(reinterpret_cast<std::uint8_t*>(code_at)), scale(reinterpret_cast<std::uint16_t*>(scale_at)), page_size(slots),
        code_batch(code_batch_stride), code_head(code_head_stride), scale_batch(scale_batch_stride), scale_head(scale_head_stride) {
    require(slots && slots % kvfold::kTile == 0, "page_size must be a multiple of 16");
    require(bits >= 1 && bits <= 8, "bits must be 1 to 8");
    fold.shape.page_size = kvfold::kTile, fold.shape.head_dim = rotation.code_dim;
    fold.shape.lanes_are_tokens = lanes_are_tokens, fold.rotation = rotation, fold.levels = pointer<float>(levels);
    fold.bits = bits, fold.rule = static_cast<kvfold::ScaleRule>(rule), fold.pages = fold.tokens = 1;
  }
};

// A token of each head, the dtype that it is rounded to first, and where it folds.
struct Token {
  kvfold::Numbered given;
  kvfold::Dtype dtype;
  const TokenSide* side;
};

// Folds tokens into a free slot of each side's page `page`. False, with nothing changed, if a number or a scale is not finite then.
bool fold_tokens(const Kernels& kernels, const std::vector<Token>& tokens, std::size_t batch, std::size_t heads, std::size_t page,
                 std::size_t slot) {
  constexpr std::size_t kTile = kvfold::kTile;
  struct Folded {
    std::vector<std::uint8_t> dense, code;
    std::vector<std::uint16_t> scale;
  };
  std::vector<Folded> all;
  for (const auto& [given, dtype, side] : tokens) {
    const std::size_t dim = side->fold.rotation.dim, count = batch * heads;
    require(given.has_shape(batch, heads, 1, dim), "a token does not fit into pages: it must have the shape (batch, heads, 1, dim)");
    const std::size_t tiles = (side->fold.rotation.code_dim + kTile - 1) / kTile;
    require(slot < side->page_size, "slot must be one of the page's");
    kvfold::Fold job = side->fold;
    job.dtype = dtype;
    Folded& folded = all.emplace_back();
    folded.dense.resize(count * dim * kvfold::bytes_of(job.dtype));
    folded.code.resize(count * kTile * 2 * job.bits * tiles), folded.scale.resize(count * kTile);
    const kvfold::Numbers rounded{folded.dense.data(), heads * dim, dim, dim, job.dtype};
    if (!kernels.copy({given, rounded, batch, heads, 1, dim})) return false;
    job.x = rounded.data, job.x_batch = rounded.batch, job.x_head = job.x_token = dim, job.batch = batch, job.heads = heads;
    job.first = slot % kTile, job.code = folded.code.data(), job.scale = folded.scale.data();
    kernels.fold(job);
    for (std::size_t i = 0; i < count; ++i)
      if ((folded.scale[i * kTile + job.first] & 0x7c00) == 0x7c00) return false;
  }
  for (std::size_t s = 0; s < tokens.size(); ++s) {
    const TokenSide& side = *tokens[s].side;
    const std::size_t tiles = (side.fold.rotation.code_dim + kTile - 1) / kTile, rows = side.page_size / kTile;
    const std::size_t tile = 2 * kTile * side.fold.bits, row = slot / kTile;
    for (std::size_t b = 0; b < batch; ++b)
      for (std::size_t h = 0; h < heads; ++h) {
        const std::uint8_t* from = &all[s].code[(b * heads + h) * tiles * tile];
        std::uint8_t* to = side.code + b * side.code_batch + h * side.code_head + page * rows * tiles * tile;
        for (std::size_t g = 0; g < tiles; ++g) {
          std::uint8_t* own = to + tile * (side.fold.shape.lanes_are_tokens ? row * tiles + g : g * rows + row);
          for (std::size_t i = 0; i < tile; ++i) own[i] |= from[g * tile + i];
        }
        side.scale[b * side.scale_batch + h * side.scale_head + page * side.page_size + slot] =
            all[s].scale[(b * heads + h) * kTile + slot % kTile];
      }
  }
  return true;
}

// As `fold_tokens`; false also if kernels do not take a tensor as it lies.
bool fold_token(const std::string& isa, const std::vector<std::tuple<nb::object, int, const TokenSide*>>& sides, std::size_t batch,
                std::size_t heads, std::size_t page, std::size_t slot) {
  std::vector<Token> tokens;
  for (const auto& [token, dtype, side] : sides) {
    const auto given = kvfold::numbers_of(token);
    if (!given) return false;
    tokens.push_back({*given, static_cast<kvfold::Dtype>(dtype), side});
  }
  return fold_tokens(find(isa), tokens, batch, heads, page, slot);
}

// Rows as single tokens join them, from one length up to another, while nothing else of theirs changes: a token is appended, and its
// queries are answered, with no other look at the rows. It joins a tail, or folds into the last page by `folds`. The `read` are all
// that this points to beside the rows' own.
class Step : public kvfold::Addresses {
 public:
  using Fold = std::pair<int, const TokenSide*>;  // the dtype that tokens are rounded to, and where they fold

  Step(const Rows& rows, std::int64_t length, std::int64_t until, std::size_t pages, const std::optional<GivenSpan>& sinks,
       const std::optional<GivenSpan>& tail, std::int64_t folded_until, const std::vector<Fold>& folds, std::size_t page_size,
       std::vector<nb::object> read)
      : Addresses(std::move(read)), rows_(rows), length_(length), until_(until), folded_until_(folded_until), pages_(pages),
        page_size_(page_size) {
    for (const auto* span : {&sinks, &tail}) {
      if (!*span) continue;
      const auto& [keys, values, place, first, tokens] = **span;
      const auto key = kvfold::numbers_of(keys), value = kvfold::numbers_of(values);
      require(key && value, "a step takes dense tokens in a CPU's memory, of float32, float16 or bfloat16");
      given_.push_back({*key, *value, place, first, tokens, span == &sinks});
    }
    has_tail_ = tail.has_value();
    if (has_tail_) dtypes_[0] = given_.back().key.dtype, dtypes_[1] = given_.back().value.dtype;
    for (std::size_t i = 0; i < folds.size(); ++i)
      folds_.push_back(folds[i].second), dtypes_[i] = static_cast<kvfold::Dtype>(folds[i].first);
    require(has_tail_ || folds_.size() == 2, "a step needs somewhere for keys and values to go");
  }

  // Whether a token was appended to rows of so many. If not, nothing has changed: it is not finite, does not fit or lies otherwise, there
  // is more to do than to append it, or the rows are not as they were.
  bool append(nb::handle keys, nb::handle values, std::int64_t length) {
    if (length != length_ || length >= until_ || moved() || rows_.moved()) return false;
    const auto key = kvfold::numbers_of(keys), value = kvfold::numbers_of(values);
    if (!key || !value || !is_kept_as(dtypes_[0], key->dtype) || !is_kept_as(dtypes_[1], value->dtype)) return false;
    const std::size_t heads = rows_.common.kv_heads, batch = key->shape[0];
    if (!key->has_shape(batch, heads, 1, rows_.common.key_dim) || !value->has_shape(batch, heads, 1, rows_.common.value_dim)) return false;
    if (has_tail_) {
      Rows::Given& tail = given_.back();
      const std::size_t place = tail.place + tail.tokens;
      if (batch != tail.key.shape[0] || place >= tail.key.shape[2]) return false;
      bool finite = true;
      for (const auto& [from, to] : {std::pair(&*key, &tail.key), std::pair(&*value, &tail.value)}) {
        kvfold::Numbers room = *to;
        room.data = to->at(0, place);
        finite &= rows_.kernels.copy({*from, room, batch, heads, 1, from->shape[3]});
      }
      if (!finite) return false;
      ++tail.tokens;
    } else {
      const std::size_t after = length - rows_.common.pages_first;
      if (batch != rows_.page_rows) return false;
      const std::vector<Token> tokens = {{*key, dtypes_[0], folds_[0]}, {*value, dtypes_[1], folds_[1]}};
      if (!fold_tokens(rows_.kernels, tokens, batch, heads, after / page_size_, after % page_size_)) return false;
    }
    ++length_;
    return true;
  }

  // As `Rows::attend`, for the newest token of rows of so many; none, too, if they are not as they were.
  std::optional<bool> attend(nb::handle query, nb::handle out, std::int64_t length, float scaling, float softcap, int threads) const {
    if (length != length_ || moved() || rows_.moved()) return {};
    return rows_.attend(query, out, scaling, pages_, {has_tail_ ? folded_until_ : length_, length_}, given_, {}, softcap, 0, threads);
  }

 private:
  // Whether a cache that keeps one dtype takes another for it: `LayerCache` keeps 16 bits of float32, unless it was told what to keep.
  static bool is_kept_as(kvfold::Dtype kept, kvfold::Dtype given) {
    return given == kept || (given == kvfold::Dtype::float32 && kept == kvfold::Dtype::float16);
  }

  const Rows& rows_;
  std::int64_t length_, until_, folded_until_;
  std::size_t pages_, page_size_;
  std::vector<Rows::Given> given_;
  bool has_tail_ = false;
  std::vector<const TokenSide*> folds_;
  kvfold::Dtype dtypes_[2] = {};
};

using ConstInts = nb::ndarray<const std::int64_t, nb::c_contig, nb::device::cpu>;

// A layer's pool as a step reads it.
struct PagedLayer : kvfold::PagedLayer {
  Kernels kernels;
  OwnedSide own_keys, own_values;  // the sides' tables of bits and groups
  PagedLayer(const std::string& isa, const OwnedSide& key_side, const OwnedSide& value_side, const kvfold::Rotation& of_keys,
             const kvfold::Rotation& of_values, std::size_t heads, std::size_t repeats, std::size_t key_channels,
             std::size_t value_channels, float scale, float cap, std::uintptr_t logits, int tail_dtype,
             std::uintptr_t key_tails, std::uintptr_t value_tails)
      : kernels(find(isa)), own_keys(key_side), own_values(value_side) {
    keys = own_keys.view(), values = own_values.view(), key_rotation = of_keys, value_rotation = of_values;
    kv_heads = heads, repeat = repeats, key_dim = key_channels, value_dim = value_channels;
    scaling = scale, softcap = cap, sink_logits = pointer<float>(logits), dtype = static_cast<kvfold::Dtype>(tail_dtype);
    tail_keys = reinterpret_cast<char*>(key_tails), tail_values = reinterpret_cast<char*>(value_tails);
  }
  PagedLayer(const PagedLayer&) = delete;  // its sides point into it
};

kvfold::PagedStep paged_step(ConstInts rows, ConstInts page_at, std::size_t page_size) {
  require(rows.ndim() == 2 && rows.shape(1) == 5, "rows must have the shape (sequences, 5)");
  require(page_at.ndim() == 2 && page_at.shape(0) == rows.shape(0), "page_at must have the shape (sequences, pages)");
  std::vector<kvfold::PagedRow> own;
  for (std::size_t i = 0; i < rows.shape(0); ++i) {
    const std::int64_t* row = rows.data() + 5 * i;
    own.push_back({row[0], row[1], row[2], row[3], row[4]});
    require(row[0] >= 0 && row[1] >= 1 && row[2] >= row[1], "a row has at least one new token");
    const auto size = static_cast<std::int64_t>(page_size);
    require((row[2] - 1) / size <= static_cast<std::int64_t>(page_at.shape(1)), "page_at must name every page that is read");
    require(row[3] >= 0 || (row[2] - row[1]) % size == 0, "a row that goes on in an unfinished page needs its slot");
  }
  return kvfold::PagedStep(std::move(own), std::vector<std::int64_t>(page_at.data(), page_at.data() + page_at.size()),
                           page_at.shape(1), page_size);
}

// Addresses and strides, in elements, of (tokens, heads, dim).
bool paged_attend(const kvfold::PagedStep& step, const PagedLayer& layer, std::uintptr_t query, std::size_t query_token,
                  std::size_t query_head, std::uintptr_t key, std::size_t key_token, std::size_t key_head,
                  std::uintptr_t value, std::size_t value_token, std::size_t value_head, std::uintptr_t out, int threads) {
  nb::gil_scoped_release release;
  return step.attend(layer, layer.kernels.attend, {pointer<char>(query), query_token, query_head},
                     {pointer<char>(key), key_token, key_head}, {pointer<char>(value), value_token, value_head},
                     reinterpret_cast<float*>(out), threads);
}

}  // namespace

NB_MODULE(_cpu, m) {
  nb::set_leak_warnings(false);  // caches that a script still holds when it ends are no leak
  m.def("instruction_sets", &instruction_sets);
  m.def("in_integers", [](const std::string& isa, const OwnedSide& side) { return find(isa).in_integers(side.view()); });
  nb::class_<OwnedSide>(m, "Side")
      .def(nb::init<std::uintptr_t, std::size_t, std::size_t, std::size_t, std::size_t, nb::bytes, bool, std::uintptr_t,
                    std::size_t, bool>())
      .def("set_first_channels", &OwnedSide::set_first_channels)
      .def("set_scale", &OwnedSide::set_scale)
      .def("set_plain", &OwnedSide::set_plain)
      .def("set_centre", &OwnedSide::set_centre);
  nb::class_<kvfold::Rotation>(m, "Rotation")
      .def_static("matrix", &matrix_rotation)
      .def_static("order", &order_rotation)
      .def_static("ordered_matrix", &ordered_matrix_rotation)
      .def_static("hadamard", &hadamard_rotation);
  nb::class_<kvfold::Addresses>(m, "Addresses")
      .def(nb::init<std::vector<nb::object>>())
      .def("moved", &kvfold::Addresses::moved);
  nb::class_<Rows, kvfold::Addresses>(m, "Rows")
      .def(nb::init<const std::string&, const OwnedSide&, const OwnedSide&, const kvfold::Rotation&, const kvfold::Rotation&,
                    std::size_t, std::size_t, std::size_t, std::size_t, std::int64_t, std::vector<nb::object>>())
      .def("attend", nb::overload_cast<nb::handle, nb::handle, float, std::size_t, const std::vector<std::int64_t>&,
                                       const std::optional<GivenSpan>&, const std::optional<GivenSpan>&, const std::optional<MaskAt>&,
                                       float, std::uintptr_t, int>(&Rows::attend, nb::const_));
  m.def("copy", &copy);
  nb::class_<PagedLayer>(m, "PagedLayer")
      .def(nb::init<const std::string&, const OwnedSide&, const OwnedSide&, const kvfold::Rotation&, const kvfold::Rotation&,
                    std::size_t, std::size_t, std::size_t, std::size_t, float, float, std::uintptr_t, int, std::uintptr_t,
                    std::uintptr_t>());
  nb::class_<kvfold::PagedStep>(m, "PagedStep").def("attend", &paged_attend);
  m.def("paged_step", &paged_step);
  nb::class_<TokenSide>(m, "TokenSide")
      .def(nb::init<const kvfold::Rotation&, std::uintptr_t, unsigned, int, bool, std::size_t, std::uintptr_t, std::size_t,
                    std::size_t, std::uintptr_t, std::size_t, std::size_t>());
  m.def("fold_token", &fold_token);
  nb::class_<Step, kvfold::Addresses>(m, "Step")
      .def(nb::init<const Rows&, std::int64_t, std::int64_t, std::size_t, const std::optional<GivenSpan>&, const std::optional<GivenSpan>&,
                    std::int64_t, const std::vector<Step::Fold>&, std::size_t, std::vector<nb::object>>(),
           nb::keep_alive<1, 2>())
      .def("append", &Step::append)
      .def("attend", &Step::attend);
  m.def("pack", &pack);
  m.def("unpack", &unpack);
  m.def("unpack_levels", &unpack_levels);
  m.def("fold_channelwise", &fold_channelwise);
  m.def("fold", &fold, nb::arg("isa"), nb::arg("x"), nb::arg("dtype"), nb::arg("x_batch"), nb::arg("x_head"),
        nb::arg("x_token"), nb::arg("tokens"), nb::arg("first"), nb::arg("rotation"), nb::arg("levels"), nb::arg("rule"),
        nb::arg("lanes_are_tokens"), nb::arg("code"), nb::arg("scale"), nb::arg("centre").none(), nb::arg("threads"));
}
