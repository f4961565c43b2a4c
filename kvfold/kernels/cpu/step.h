// Appends single tokens: to pages, for kvfold/kernels/cpu/tokens.py, or to rows that attention reads right after.
#pragma once

#include "rows.h"

namespace {

// Pages of one side, for tokens that fold one by one: how a token is coded, and where pages are. Strides of codes are in bytes,
// of scales in numbers. Addresses and strides are those of torch tensors that the caller keeps alive.
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

// Folds tokens into a free slot of each side's page `page`. Returns false, with nothing changed, if a rounded number or a scale
// is not finite.
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

// As `fold_tokens`; also false if kernels cannot use a tensor in place.
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

// A fast path for rows that single tokens extend, from one length up to another, while nothing else of the rows changes. It
// appends a token and answers its query without another look at the rows. The token joins the tail, or folds into the last page
// by `folds`. `read`: all tensors that this points to beside the rows' own.
class Step : public kvfold::Addresses {
 public:
  using Fold = std::pair<int, const TokenSide*>;  // the dtype that tokens are rounded to, and where they fold

  Step(const Rows& rows, std::int64_t length, std::int64_t until, std::size_t pages, const std::optional<GivenSpan>& sinks,
       const std::optional<GivenSpan>& tail, const std::vector<Fold>& folds, std::vector<nb::object> read)
      : Addresses(std::move(read)), rows_(rows), length_(length), until_(until), pages_(pages), has_tail_(tail.has_value()) {
    const auto given = Rows::as_given(sinks, tail);
    require(given.has_value(), "a step takes dense tokens in a CPU's memory, of float32, float16 or bfloat16");
    given_ = *given;
    if (has_tail_) dtypes_[0] = given_.back().key.dtype, dtypes_[1] = given_.back().value.dtype;
    for (std::size_t i = 0; i < folds.size(); ++i)
      folds_.push_back(folds[i].second), dtypes_[i] = static_cast<kvfold::Dtype>(folds[i].first);
    require(has_tail_ || folds_.size() == 2, "a step needs somewhere for keys and values to go");
  }

  // Appends a token to rows of `length` tokens. Returns false, with nothing changed, if it is not finite, its shape or layout
  // does not fit, more is to do than to append it, or the rows are not as they were.
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
      const std::size_t after = length - rows_.common.pages_first, page_size = rows_.common.keys.shape.page_size;
      if (batch != rows_.page_rows) return false;
      const std::vector<Token> tokens = {{*key, dtypes_[0], folds_[0]}, {*value, dtypes_[1], folds_[1]}};
      if (!fold_tokens(rows_.kernels, tokens, batch, heads, after / page_size, after % page_size)) return false;
    }
    ++length_;
    return true;
  }

  // As `Rows::attend`, for the newest token of rows of `length` tokens; also nullopt if they are not as they were.
  std::optional<bool> attend(nb::handle query, nb::handle out, std::int64_t length, float scaling, float softcap, int threads) const {
    if (length != length_ || moved() || rows_.moved()) return {};
    return rows_.attend(query, out, scaling, pages_, {has_tail_ ? given_.back().first : length_, length_}, given_, {}, softcap, 0, threads);
  }

 private:
  // Whether a cache that keeps dtype `kept` takes tokens of `given`: `LayerCache` keeps float32 as float16 by default.
  static bool is_kept_as(kvfold::Dtype kept, kvfold::Dtype given) {
    return given == kept || (given == kvfold::Dtype::float32 && kept == kvfold::Dtype::float16);
  }

  const Rows& rows_;
  std::int64_t length_, until_;
  std::size_t pages_;
  bool has_tail_;
  std::vector<Rows::Given> given_;  // sinks, then the tail
  std::vector<const TokenSide*> folds_;
  kvfold::Dtype dtypes_[2] = {};
};

}  // namespace
