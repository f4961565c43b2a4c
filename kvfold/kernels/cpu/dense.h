// Attention over dense tokens: their scores, and weighted sums of their values.
#pragma once

#include "attend.h"
#include "dtypes.h"

namespace kvfold::KVFOLD_ISA {
namespace {

constexpr std::size_t kFewRows = 8;  // query rows that read dense keys as they lie; transposing pays for more

// Reads dense tokens of a head, at most kDenseBlock at a time, for rows of queries. Rows of scores and probabilities lie
// kDenseBlock apart.
class DenseTokens {
 public:
  explicit DenseTokens(const Attention& job) : key_dim_(job.key_dim), value_dim_(job.value_dim), dense_width_(padded(job.value_dim)) {}

  // Scores of `tokens` tokens from the `from`th on; those after the last token mean nothing.
  void score(const float* query, std::size_t rows, std::size_t head, const Span& span, std::size_t from, std::size_t tokens,
             float* scores) {
    const std::size_t at = head * span.key_head + from * span.key_token;
    if (rows <= kFewRows)
      return of_few_rows(rows, span.dtype, [&]<std::size_t Rows, Dtype Number>(std::size_t r) {
        for (std::size_t t = 0; t < tokens; t += kBlock)
          score_few<Rows, Number>(query + r * key_dim_, span, at, t, tokens - 1, scores + r * kDenseBlock);
      });
    if (!keys_.size()) keys_ = Buffer(key_dim_ * kDenseBlock);  // [channel][token]
    for (std::size_t first = 0; first < tokens; first += kLanes) {
      const std::size_t here = std::min(kLanes, tokens - first);
      for (std::size_t c = 0; c < key_dim_; c += kLanes) {
        const std::size_t channels = std::min(kLanes, key_dim_ - c);
        Vec lines[kLanes] = {};
        for (std::size_t t = 0; t < here; ++t)
          lines[t] = load_some(span.dtype, span.key, at + (first + t) * span.key_token + c, channels);
        transpose(lines);
        for (std::size_t i = 0; i < channels; ++i) store(&keys_[(c + i) * kDenseBlock + first], lines[i]);
      }
    }
    multiply<false>(rows, key_dim_, padded(tokens), query, key_dim_, keys_.data(), kDenseBlock, scores, kDenseBlock);
  }

  // Adds values, weighted by probabilities, to sums.
  void add(const float* probabilities, std::size_t rows, std::size_t head, const Span& span, std::size_t from, std::size_t tokens,
           float* sums) {
    const std::size_t at = head * span.value_head + from * span.value_token;
    if (rows <= kFewRows)
      return of_few_rows(rows, span.dtype, [&]<std::size_t Rows, Dtype Number>(std::size_t r) {
        const float* own = probabilities + r * kDenseBlock;
        std::size_t c = 0;
        for (; c + 4 * kLanes <= value_dim_; c += 4 * kLanes)
          add_few<Rows, 4, Number>(own, span, at, tokens, c, sums + r * dense_width_);
        for (; c < value_dim_; c += kLanes) add_few<Rows, 1, Number>(own, span, at, tokens, c, sums + r * dense_width_);
      });
    if (!values_.size()) values_ = Buffer(kDenseBlock * dense_width_);  // [token][channel]
    for (std::size_t t = 0; t < tokens; ++t)
      for (std::size_t c = 0; c < value_dim_; c += kLanes)
        store(&values_[t * dense_width_ + c], load_some(span.dtype, span.value, at + t * span.value_token + c,
                                                             std::min(kLanes, value_dim_ - c)));
    multiply<true>(rows, tokens, dense_width_, probabilities, kDenseBlock, values_.data(), dense_width_, sums, dense_width_);
  }

 private:
  // Calls visit<Rows, Number>(first) over query rows, for a span of that dtype.
  template <typename Visit>
  static void of_few_rows(std::size_t rows, Dtype dtype, Visit visit) {
    in_blocks(rows, [&]<std::size_t Rows>(std::integral_constant<std::size_t, Rows>, std::size_t r) {
      if (dtype == Dtype::float32) visit.template operator()<Rows, Dtype::float32>(r);
      if (dtype == Dtype::float16) visit.template operator()<Rows, Dtype::float16>(r);
      if (dtype == Dtype::bfloat16) visit.template operator()<Rows, Dtype::bfloat16>(r);
    });
  }

  // Scores of Rows rows with the kBlock tokens from `first` on; `last` is read in place of those after it.
  template <std::size_t Rows, Dtype Number>
  void score_few(const float* query, const Span& span, std::size_t at, std::size_t first, std::size_t last, float* scores) const {
    Vec sums[Rows][kBlock] = {};
    for (std::size_t c = 0; c < key_dim_; c += kLanes) {
      const std::size_t channels = std::min(kLanes, key_dim_ - c);
      Vec key[kBlock];
      each<kBlock>([&](auto t) KVFOLD_LAMBDA {
        key[t] = load_some(Number, span.key, at + std::min(first + t, last) * span.key_token + c, channels);
      });
      each<Rows>([&](auto i) KVFOLD_LAMBDA {
        const Vec q = load_some(Dtype::float32, query, i * key_dim_ + c, channels);
        each<kBlock>([&](auto t) KVFOLD_LAMBDA { sums[i][t] += q * key[t]; });
      });
    }
    each<Rows>([&](auto i) KVFOLD_LAMBDA { store(scores + i * kDenseBlock + first, sum_four(sums[i])); });
  }

  // `add` for Rows rows and Width vectors of channels from c on.
  template <std::size_t Rows, std::size_t Width, Dtype Number>
  void add_few(const float* probabilities, const Span& span, std::size_t at, std::size_t tokens, std::size_t c, float* to) const {
    const std::size_t channels = std::min(kLanes, value_dim_ - c);
    Vec sums[Rows][Width];
    each<Rows>([&](auto i) KVFOLD_LAMBDA {
      each<Width>([&](auto w) KVFOLD_LAMBDA { sums[i][w] = load(to + i * dense_width_ + c + w * kLanes); });
    });
    for (std::size_t t = 0; t < tokens; ++t) {
      Vec value[Width];
      each<Width>([&](auto w) KVFOLD_LAMBDA {
        value[w] = load_some(Number, span.value, at + t * span.value_token + c + w * kLanes, Width > 1 ? kLanes : channels);
      });
      each<Rows>([&](auto i) KVFOLD_LAMBDA {
        const Vec p = all(probabilities[i * kDenseBlock + t]);
        each<Width>([&](auto w) KVFOLD_LAMBDA { sums[i][w] += p * value[w]; });
      });
    }
    each<Rows>([&](auto i) KVFOLD_LAMBDA {
      each<Width>([&](auto w) KVFOLD_LAMBDA { store(to + i * dense_width_ + c + w * kLanes, sums[i][w]); });
    });
  }

  std::size_t key_dim_, value_dim_, dense_width_;
  Buffer keys_, values_;  // scratch for many rows
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
