// The body of attention, compiled once for each instruction set: attend_serial.cpp and its siblings include it with
// KVFOLD_ISA set to their namespace.
#include <atomic>
#include <memory>
#include <optional>

#include "integer_keys.h"
#include "integer_values.h"
#include "page.h"
#include "rotate.h"

namespace kvfold::KVFOLD_ISA {
namespace {

constexpr std::size_t kBlocksAThread = 12;  // less work than this is not worth waking a thread
constexpr std::size_t kPiece = 16;          // blocks of a context that one thread reads at a time for few queries
constexpr std::size_t kPages = 8;           // pages whose softmax is taken together …
constexpr std::size_t kScores = 4096;       // … unless that is more scores than stay near
constexpr std::size_t kFewRows = 8;         // query rows that read dense keys as they lie; turning those pays for more

// Softmax state of a block of query rows over a piece of their context.
struct State {
  float *total, *maximum, *rotated, *plain;  // total: in 16 parts; plain: null if the piece has no dense tokens

  static std::size_t size(std::size_t rows, std::size_t rotated_width, std::size_t plain_width) {
    return rows * (kLanes + rotated_width + plain_width) + padded(rows);
  }
  State(float* at, std::size_t rows, std::size_t rotated_width, bool dense)
      : total(at), maximum(at + rows * kLanes), rotated(maximum + padded(rows)), plain(dense ? rotated + rows * rotated_width : nullptr) {}

  void begin(std::size_t rows, std::size_t rotated_width, std::size_t plain_width) const {
    std::fill_n(total, rows * kLanes, 0.0f), std::fill_n(maximum, rows, kNever), std::fill_n(rotated, rows * rotated_width, 0.0f);
    if (plain) std::fill_n(plain, rows * plain_width, 0.0f);
  }
};

// Of one sequence and KV head: rows `first` to `first + count` of its (repeat, queries) rows.
struct Unit {
  const Sequence* sequence;
  std::size_t head, first, count;
  std::size_t first_row;           // of the rows of all sequences and heads
  std::size_t pieces, first_piece;  // of the context
  std::size_t states;               // where those of its pieces begin
};

// A part of a unit's context, in blocks: its pages, then its dense tokens.
struct Piece {
  const Unit* unit = nullptr;
  std::size_t begin = 0, end = 0;
};

// Units over pieces of their context.
class Worker {
 public:
  Worker(const Attention& job, std::size_t most_rows, std::size_t most_pages)
      : job_(job),
        key_width_(job.keys.shape.head_dim + job.keys.plain_dim),
        rotated_width_(padded(job.values.shape.head_dim)),
        plain_width_(padded(job.value_dim)),
        size_(job.keys.shape.page_size),
        scores_(Buffer::unset(std::max(most_rows * std::max(size_, kDenseBlock),
                                       std::min(most_rows * size_ * std::min(kPages, most_pages), kScores))))
#ifdef __AVX512VNNI__
        ,
        integer_keys_(job.keys),
        integer_values_(job.values)
#endif
  {
    std::size_t keys = 1, values = 1;  // those that are unfolded are read one at a time
#ifdef __AVX512VNNI__
    if (integer_keys_.fits()) keys = kPages;
    if (integer_values_.fits()) values = kPages;
#endif
    for (std::size_t i = 0; i < std::min(keys, most_pages); ++i) key_pages_[i].emplace(job.keys, Layout::channels_first);
    for (std::size_t i = 0; i < std::min(values, most_pages); ++i) value_pages_[i].emplace(job.values, Layout::tokens_first);
  }

  // `query` and `rotated_query` are those of the rows, scaled. `following`, of no unit if there is none, is what comes after.
  void run(const State& state, const Piece& piece, const float* query, const float* rotated_query, const Piece& following) {
    const Unit& unit = *piece.unit;
    if (&unit != unit_) {
      unit_ = &unit, sequence_ = unit.sequence, head_ = unit.head, first_ = unit.first, count_ = unit.count;
      for (std::size_t r = 0; r < count_; ++r) query_[r] = (first_ + r) % sequence_->queries;
      keys_ = HeadPages(job_.keys, *sequence_, head_), values_ = HeadPages(job_.values, *sequence_, head_);
    }
#ifdef __AVX512VNNI__
    if (piece.begin < sequence_->pages && integer_keys_.fits() && &unit != prepared_)
      integer_keys_.prepare(rotated_query, count_, std::min(pages_at_once(unit), sequence_->pages)), prepared_ = &unit;
#endif
    for (std::size_t block = piece.begin; block < piece.end; ++block) {
      if (block < sequence_->pages) {
        const std::size_t pages = first_pages({&unit, block, piece.end});
        const auto start = [&](std::size_t page) { return job_.pages_first + static_cast<std::int64_t>((block + page) * size_); };
        std::size_t seen = 0;
        while (seen < pages && visible(start(seen), static_cast<std::int64_t>(size_), nullptr, sequence_->folded_stop)) ++seen;
        if (!seen) continue;
        const Piece rest{&unit, block + seen, piece.end};
        expect(block, seen, seen == pages && first_pages(rest) ? rest : following);
        read_pages(state, rotated_query, block, seen, start(0));
        ahead_.ask_for_rest();
        block += seen - 1;
      } else {
        std::size_t rest = block - sequence_->pages, at = 0;
        while (rest >= blocks(sequence_->spans[at])) rest -= blocks(sequence_->spans[at++]);
        const Span& span = sequence_->spans[at];
        const std::size_t from = rest * kDenseBlock, tokens = std::min(kDenseBlock, span.tokens - from);
        const std::int64_t start = span.first + static_cast<std::int64_t>(from);
        if (!visible(start, static_cast<std::int64_t>(tokens), span.start, span.stop)) continue;
        read_dense(state, query, start, from, tokens, span);
      }
    }
  }

  static std::size_t blocks(const Span& span) { return (span.tokens + kDenseBlock - 1) / kDenseBlock; }

 private:
  // Whether some row may look at positions from `start` on; `starts` and `stops` bound each query's view.
  bool visible(std::int64_t start, std::int64_t tokens, const std::int64_t* starts, const std::int64_t* stops) const {
    for (std::size_t r = 0; r < count_; ++r) {
      const std::size_t q = query_[r];
      if (stops[q] > start && (!starts || starts[q] < start + tokens)) return true;
    }
    return false;
  }

  // Calls visit<Rows, Number>(first) over query rows, for a span of that dtype.
  template <typename Visit>
  void of_few_rows(Dtype dtype, Visit visit) const {
    in_blocks(count_, [&]<std::size_t Rows>(std::integral_constant<std::size_t, Rows>, std::size_t r) {
      if (dtype == Dtype::float32) visit.template operator()<Rows, Dtype::float32>(r);
      if (dtype == Dtype::float16) visit.template operator()<Rows, Dtype::float16>(r);
      if (dtype == Dtype::bfloat16) visit.template operator()<Rows, Dtype::bfloat16>(r);
    });
  }

  // Scores of `tokens` dense tokens from the `from`th on, kDenseBlock apart from row to row; what lies after the last token
  // means nothing.
  void score_dense(const float* query, std::size_t from, std::size_t tokens, const Span& span) {
    const std::size_t at = head_ * span.key_head + from * span.key_token;
    if (count_ <= kFewRows)
      return of_few_rows(span.dtype, [&]<std::size_t Rows, Dtype Number>(std::size_t r) {
        for (std::size_t t = 0; t < tokens; t += kBlock)
          score_few<Rows, Number>(query + r * job_.key_dim, span, at, t, tokens - 1, scores_.data() + r * kDenseBlock);
      });
    if (!dense_key_.size()) dense_key_ = Buffer(job_.key_dim * kDenseBlock);  // [channel][token]
    for (std::size_t first = 0; first < tokens; first += kLanes) {
      const std::size_t here = std::min(kLanes, tokens - first);
      for (std::size_t c = 0; c < job_.key_dim; c += kLanes) {
        const std::size_t channels = std::min(kLanes, job_.key_dim - c);
        Vec lines[kLanes] = {};
        for (std::size_t t = 0; t < here; ++t)
          lines[t] = load_some(span.dtype, span.key, at + (first + t) * span.key_token + c, channels);
        transpose(lines);
        for (std::size_t i = 0; i < channels; ++i) store(&dense_key_[(c + i) * kDenseBlock + first], lines[i]);
      }
    }
    multiply<false>(count_, job_.key_dim, padded(tokens), query, job_.key_dim, dense_key_.data(), kDenseBlock, scores_.data(),
                    kDenseBlock);
  }

  // Scores of Rows rows with the kBlock tokens from `first` on, of which those after `last` are read as it.
  template <std::size_t Rows, Dtype Number>
  void score_few(const float* query, const Span& span, std::size_t at, std::size_t first, std::size_t last, float* scores) const {
    Vec sums[Rows][kBlock] = {};
    for (std::size_t c = 0; c < job_.key_dim; c += kLanes) {
      const std::size_t channels = std::min(kLanes, job_.key_dim - c);
      Vec key[kBlock];
      each<kBlock>([&](auto t) KVFOLD_LAMBDA {
        key[t] = load_some(Number, span.key, at + std::min(first + t, last) * span.key_token + c, channels);
      });
      each<Rows>([&](auto i) KVFOLD_LAMBDA {
        const Vec q = load_some(Dtype::float32, query, i * job_.key_dim + c, channels);
        each<kBlock>([&](auto t) KVFOLD_LAMBDA { sums[i][t] += q * key[t]; });
      });
    }
    each<Rows>([&](auto i) KVFOLD_LAMBDA { store(scores + i * kDenseBlock + first, sum_four(sums[i])); });
  }

  // Adds to sums what probabilities make of dense values.
  void add_dense(float* sums, std::size_t from, std::size_t tokens, const Span& span) {
    const std::size_t at = head_ * span.value_head + from * span.value_token;
    if (count_ <= kFewRows)
      return of_few_rows(span.dtype, [&]<std::size_t Rows, Dtype Number>(std::size_t r) {
        const float* probabilities = scores_.data() + r * kDenseBlock;
        std::size_t c = 0;
        for (; c + 4 * kLanes <= job_.value_dim; c += 4 * kLanes)
          add_few<Rows, 4, Number>(probabilities, span, at, tokens, c, sums + r * plain_width_);
        for (; c < job_.value_dim; c += kLanes) add_few<Rows, 1, Number>(probabilities, span, at, tokens, c, sums + r * plain_width_);
      });
    if (!dense_value_.size()) dense_value_ = Buffer(kDenseBlock * plain_width_);  // [token][channel]
    for (std::size_t t = 0; t < tokens; ++t)
      for (std::size_t c = 0; c < job_.value_dim; c += kLanes)
        store(&dense_value_[t * plain_width_ + c], load_some(span.dtype, span.value, at + t * span.value_token + c,
                                                             std::min(kLanes, job_.value_dim - c)));
    multiply<true>(count_, tokens, plain_width_, scores_.data(), kDenseBlock, dense_value_.data(), plain_width_, sums, plain_width_);
  }

  // … of Rows rows, for Width vectors of channels from c on.
  template <std::size_t Rows, std::size_t Width, Dtype Number>
  void add_few(const float* probabilities, const Span& span, std::size_t at, std::size_t tokens, std::size_t c, float* to) const {
    const std::size_t channels = std::min(kLanes, job_.value_dim - c);
    Vec sums[Rows][Width];
    each<Rows>([&](auto i) KVFOLD_LAMBDA {
      each<Width>([&](auto w) KVFOLD_LAMBDA { sums[i][w] = load(to + i * plain_width_ + c + w * kLanes); });
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
      each<Width>([&](auto w) KVFOLD_LAMBDA { store(to + i * plain_width_ + c + w * kLanes, sums[i][w]); });
    });
  }

  // How many pages are read together, so that what each takes to be ready is hidden behind the others.
  std::size_t pages_at_once(const Unit& unit) const { return std::clamp<std::size_t>(kScores / (unit.count * size_), 1, kPages); }

  // How many pages of a piece are read first, if their tokens are visible.
  std::size_t first_pages(const Piece& piece) const {
    if (!piece.unit || piece.begin >= piece.unit->sequence->pages) return 0;
    return std::min({pages_at_once(*piece.unit), piece.unit->sequence->pages - piece.begin, piece.end - piece.begin});
  }

  // Has memory asked for the first pages of what follows while these pages are read. Not where pages are unfolded: there a
  // core's own guesses do better.
  void expect([[maybe_unused]] std::size_t first, [[maybe_unused]] std::size_t pages, [[maybe_unused]] const Piece& following) {
#ifdef __AVX512VNNI__
    const auto expect_keys = [this](const HeadPages& keys, std::size_t from, std::size_t count) {
      if (integer_keys_.fits()) keys.expect(ahead_, from, count);
    };
    const auto expect_values = [this](const HeadPages& values, std::size_t from, std::size_t count) {
      if (integer_values_.fits()) values.expect(ahead_, from, count);
    };
    ahead_.forget();
    if (unit_ != expected_.unit || first != expected_.begin) {  // nobody has asked for these
      expect_keys(keys_, first, pages);
      ahead_.ask_for_rest();
      expect_values(values_, first, pages);
    }
    expected_ = following;
    if (const std::size_t next = first_pages(following)) {
      const bool same = following.unit == unit_;
      const Sequence& sequence = *following.unit->sequence;
      expect_keys(same ? keys_ : HeadPages(job_.keys, sequence, following.unit->head), following.begin, next);
      expect_values(same ? values_ : HeadPages(job_.values, sequence, following.unit->head), following.begin, next);
    }
#endif
  }

  // Reads folded pages into the state: either side in integers, if its codes fit them.
  void read_pages(const State& state, const float* rotated_query, std::size_t first, std::size_t pages, std::int64_t start) {
    const std::size_t tokens = pages * size_;
    read_keys(rotated_query, first, pages, tokens);
    settle(state, tokens, start, tokens, tokens, nullptr, sequence_->folded_stop);
    read_values(state, first, pages, tokens);
  }

  void read_keys(const float* rotated_query, std::size_t first, std::size_t pages, std::size_t stride) {
#ifdef __AVX512VNNI__
    if (integer_keys_.fits()) {
      for (std::size_t page = 0; page < pages; ++page) {
        key_pages_[page]->find(keys_, first + page);
        integer_keys_.prepare_page(page, *key_pages_[page], count_, ahead_);
      }
      for (std::size_t page = 0; page < pages; ++page)
        integer_keys_.scores(page, *key_pages_[page], count_, scores_.data() + page * size_, stride, ahead_);
      return;
    }
#endif
    for (std::size_t page = 0; page < pages; ++page) {
      Page& keys = *key_pages_[0];
      keys.find(keys_, first + page), keys.unfold();
      multiply<false>(count_, key_width_, size_, rotated_query, key_width_, keys.data(), size_,
                      scores_.data() + page * size_, stride);
    }
  }

  void read_values(const State& state, std::size_t first, std::size_t pages, std::size_t stride) {
#ifdef __AVX512VNNI__
    if (integer_values_.fits()) {
      if (!integer_values_.takes_exponentials()) take_exponentials(state, stride, stride);
      integer_values_.expect(count_, pages);
      for (std::size_t page = 0; page < pages; ++page) {
        value_pages_[page]->find(values_, first + page);
        integer_values_.prepare(page, *value_pages_[page], count_, scores_.data() + page * size_, stride, maximum_, state.total, ahead_);
      }
      for (std::size_t page = 0; page < pages; ++page)
        integer_values_.add(page, *value_pages_[page], count_, state.rotated, ahead_);
      return;
    }
#endif
    take_exponentials(state, stride, stride);
    for (std::size_t page = 0; page < pages; ++page) {
      Page& values = *value_pages_[0];
      values.find(values_, first + page), values.unfold();
      multiply<true>(count_, size_, rotated_width_, scores_.data() + page * size_, stride, values.data(), rotated_width_,
                     state.rotated, rotated_width_);
    }
  }

  // Reads dense tokens, at most kDenseBlock, from the `from`th of a span on.
  void read_dense(const State& state, const float* query, std::int64_t start, std::size_t from, std::size_t tokens, const Span& span) {
    score_dense(query, from, tokens, span);
    settle(state, kDenseBlock, start, tokens, padded(tokens), span.start, span.stop);
    take_exponentials(state, kDenseBlock, padded(tokens));
    add_dense(state.plain, from, tokens, span);
  }

  // Raises the maxima to those of scores, `stride` apart from row to row, and rescales older sums to match.
  void settle(const State& state, std::size_t stride, std::int64_t start, std::size_t tokens, std::size_t width,
              const std::int64_t* starts, const std::int64_t* stops) {
    in_blocks(count_, [&]<std::size_t Rows>(std::integral_constant<std::size_t, Rows>, std::size_t first) {
      float* scores = scores_.data() + first * stride;
      for (std::size_t i = 0; i < Rows; ++i) hide(first + i, scores + i * stride, start, tokens, width, starts, stops);
      Vec most[Rows];
      for (std::size_t i = 0; i < Rows; ++i) most[i] = all(state.maximum[first + i]);
      for (std::size_t t = 0; t < width; t += kLanes)
        for (std::size_t i = 0; i < Rows; ++i) {
          const Vec s = load(scores + i * stride + t);
          most[i] = s > most[i] ? s : most[i];
        }
      for (std::size_t i = 0; i < Rows; ++i) {
        const float before = state.maximum[first + i], maximum = largest(most[i]);
        maximum_[first + i] = maximum == kNever ? 0.0f : maximum;
        if (maximum > before) rescale(state, first + i, before == kNever ? 0.0f : std::exp(before - maximum));
        state.maximum[first + i] = maximum;
      }
    });
  }

  // Scores to unnormalised probabilities, in place.
  void take_exponentials(const State& state, std::size_t stride, std::size_t width) {
    in_blocks(count_, [&]<std::size_t Rows>(std::integral_constant<std::size_t, Rows>, std::size_t first) {
      float* scores = scores_.data() + first * stride;
      Vec total[Rows] = {};
      for (std::size_t t = 0; t < width; t += kLanes) {
        ahead_.ask<6>();
        for (std::size_t i = 0; i < Rows; ++i) {
          const Vec p = exp_vec(load(scores + i * stride + t) - maximum_[first + i]);
          store(scores + i * stride + t, p);
          total[i] += p;
        }
      }
      for (std::size_t i = 0; i < Rows; ++i) {
        float* to = &state.total[(first + i) * kLanes];
        store(to, load(to) + total[i]);
      }
    });
  }

  // Scores of row r as softmax takes them: soft-capped, and -∞ where the row may not look or no token is.
  void hide(std::size_t r, float* scores, std::int64_t start, std::size_t tokens, std::size_t width,
            const std::int64_t* starts, const std::int64_t* stops) const {
    const std::size_t q = query_[r];
    if (job_.softcap != 0.0f)
      for (std::size_t t = 0; t < tokens; ++t) scores[t] = job_.softcap * std::tanh(scores[t] / job_.softcap);
    const auto clamp = [&](std::int64_t position) {
      return static_cast<std::size_t>(std::clamp<std::int64_t>(position - start, 0, static_cast<std::int64_t>(tokens)));
    };
    const std::size_t low = starts ? clamp(starts[q]) : 0, high = clamp(stops[q]);
    for (std::size_t t = 0; t < low; ++t) scores[t] = kNever;
    for (std::size_t t = high; t < width; ++t) scores[t] = kNever;
    if (!job_.mask) return;
    const std::size_t head = head_ * job_.repeat + (first_ + r) / sequence_->queries;
    const std::uint8_t* mask = job_.mask + sequence_->row * job_.mask_batch + head * job_.mask_head + q * job_.mask_query;
    const std::int64_t known = std::clamp<std::int64_t>(job_.mask_columns - start, 0, static_cast<std::int64_t>(width));
    std::size_t t = 0;
    for (; t + kLanes <= static_cast<std::size_t>(known); t += kLanes) hide_unseen(mask + start + t, scores + t);
    for (; t < width; t += kLanes) {
      std::uint8_t last[kLanes] = {};
      const std::size_t some = std::max<std::int64_t>(known - static_cast<std::int64_t>(t), 0);
      std::copy_n(mask + start + t, some, last);
      hide_unseen(last, scores + t);
    }
  }

  // 16 scores to -∞ where 16 bytes of a mask are 0.
  static KVFOLD_INLINE void hide_unseen(const std::uint8_t* mask, float* scores) {
#ifdef __AVX512F__
    const __m128i seen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(mask));
    _mm512_mask_storeu_ps(scores, _mm_testn_epi8_mask(seen, seen), __m512(all(kNever)));
#else
    for (std::size_t i = 0; i < kLanes; ++i) scores[i] = mask[i] ? scores[i] : kNever;
#endif
  }

  void rescale(const State& state, std::size_t r, float decay) const {
    scale(&state.total[r * kLanes], kLanes, decay);
    scale(&state.rotated[r * rotated_width_], rotated_width_, decay);
    if (state.plain) scale(&state.plain[r * plain_width_], plain_width_, decay);
  }

  static void scale(float* at, std::size_t width, float by) {
    for (std::size_t c = 0; c < width; c += kLanes) store(at + c, load(at + c) * by);
  }

  const Attention& job_;
  std::optional<Page> key_pages_[kPages], value_pages_[kPages];
  std::size_t key_width_, rotated_width_, plain_width_, size_;
  Buffer scores_, dense_key_, dense_value_;
#ifdef __AVX512VNNI__
  IntegerKeys integer_keys_;
  IntegerValues integer_values_;
  const Unit* prepared_ = nullptr;  // what the keys were set to last
#endif
  Ahead ahead_;
  Piece expected_;              // whose first pages memory was asked for
  const Unit* unit_ = nullptr;  // what it was set to last
  const Sequence* sequence_ = nullptr;
  HeadPages keys_, values_;
  std::size_t head_ = 0, first_ = 0, count_ = 0;
  std::size_t query_[kRowBlock] = {};  // of each row
  float maximum_[kRowBlock] = {};      // of each row's scores so far, or 0 if it has looked at none
};

}  // namespace

bool in_integers([[maybe_unused]] const Side& side) {
#ifdef __AVX512VNNI__
  return side.shape.lanes_are_tokens ? IntegerKeys(side).fits() : IntegerValues(side).fits();
#else
  return false;
#endif
}

bool attend(const Attention& job) {
  const std::size_t coded = job.keys.shape.head_dim, key_width = coded + job.keys.plain_dim, value_width = job.values.shape.head_dim;
  const std::size_t rotated_width = padded(value_width), plain_width = padded(job.value_dim);
  // What there is to do. A sequence of few rows has its context in pieces, so that every thread has work; their length is
  // fixed, so that what a sequence gets depends neither on the others nor on the number of threads.
  std::size_t unit_count = 0, rows = 0;
  for (std::size_t s = 0; s < job.count; ++s) {
    const std::size_t own = job.repeat * job.sequences[s].queries;
    unit_count += job.kv_heads * ((own + kRowBlock - 1) / kRowBlock), rows += job.kv_heads * own;
  }
  const std::unique_ptr<Unit[]> units(new Unit[unit_count]);
  const auto blocks_of = [](const Sequence& sequence) {
    std::size_t blocks = sequence.pages;
    for (std::size_t i = 0; i < sequence.span_count; ++i) blocks += Worker::blocks(sequence.spans[i]);
    return blocks;
  };
  std::size_t pieces = 0, work = 0, most_rows = 0, most_pages = 0, first_row = 0, at = 0, room = 0;
  for (std::size_t s = 0; s < job.count; ++s) {
    const Sequence& sequence = job.sequences[s];
    const std::size_t own = job.repeat * sequence.queries, blocks = blocks_of(sequence);
    most_pages = std::max(most_pages, sequence.pages);
    const std::size_t split = own <= kRowBlock ? std::max<std::size_t>((blocks + kPiece - 1) / kPiece, 1) : 1;
    for (std::size_t head = 0; head < job.kv_heads; ++head, first_row += own)
      for (std::size_t first = 0; first < own; first += kRowBlock, pieces += split, work += blocks) {
        const std::size_t count = std::min(kRowBlock, own - first);
        units[at++] = {&sequence, head, first, count, first_row + first, split, pieces, room};
        most_rows = std::max(most_rows, count), room += split * State::size(count, rotated_width, plain_width);
      }
  }
  const std::unique_ptr<const Unit*[]> unit_of(new const Unit*[pieces]);
  for (std::size_t i = 0; i < unit_count; ++i)
    std::fill_n(&unit_of[units[i].first_piece], units[i].pieces, &units[i]);
  const std::size_t threads = std::min({static_cast<std::size_t>(std::max(job.threads, 1)), std::max<std::size_t>(work / kBlocksAThread, 1),
                                        std::max<std::size_t>(pieces, 1)});
  Buffer states = Buffer::unset(room);
  const auto piece_at = [&](std::size_t i) {
    if (i >= pieces) return Piece{};
    const Unit& unit = *unit_of[i];
    const std::size_t own = i - unit.first_piece, blocks = blocks_of(*unit.sequence);
    return Piece{&unit, blocks * own / unit.pieces, blocks * (own + 1) / unit.pieces};
  };
  const auto state_of = [&](const Unit& unit, std::size_t piece, std::size_t end) {
    const std::size_t own = piece * State::size(unit.count, rotated_width, plain_width);
    return State(&states[unit.states + own], unit.count, rotated_width, end > unit.sequence->pages);
  };
  Buffer queries = Buffer::unset(rows * job.key_dim), rotated_queries = Buffer::unset(rows * key_width);
  bool finite = true;
  std::atomic<std::size_t> next_piece{0};

#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    Rotator key_rotator(job.key_rotation);
#pragma omp for schedule(static) reduction(&& : finite)
    for (std::size_t i = 0; i < unit_count; ++i) {
      const Unit& unit = units[i];
      for (std::size_t r = 0; r < unit.count; ++r) {
        const std::size_t row = unit.first + r, n = unit.sequence->queries;
        const std::size_t from_head = (unit.head * job.repeat + row / n) * job.query_head + row % n * job.query_token;
        float *query = &queries[(unit.first_row + r) * job.key_dim], *rotated = &rotated_queries[(unit.first_row + r) * key_width];
        std::size_t c = 0;
        for (; c + kLanes <= job.key_dim; c += kLanes)
          store(query + c, load_some(job.query_dtype, unit.sequence->query, from_head + c, kLanes) * job.scaling);
        for (; c < job.key_dim; ++c) query[c] = from(job.query_dtype, unit.sequence->query, from_head + c) * job.scaling;
        key_rotator.apply_to_query(query, rotated, unit.sequence->row, unit.head);
        std::copy(query + job.key_dim - job.keys.plain_dim, query + job.key_dim, rotated + coded);
        Vec nothing{};  // NaN once a number is not finite
        for (c = 0; c < key_width; c += kLanes)
          nothing += load_some(Dtype::float32, rotated, c, std::min(kLanes, key_width - c)) * 0.0f;
        finite = finite && sum(nothing) == 0.0f;
      }
    }
    if (finite) {
      Worker worker(job, most_rows, most_pages);
      // Each thread takes a piece before it has read its last one, so as to know what to ask memory for; but not of the last few,
      // which others may be waiting for.
      for (std::size_t i = next_piece++, following; i < pieces; i = following < pieces ? following : next_piece++) {
        following = next_piece + threads <= pieces ? next_piece++ : pieces;
        const Piece piece = piece_at(i);
        const Unit& unit = *piece.unit;
        const State state = state_of(unit, i - unit.first_piece, piece.end);
        state.begin(unit.count, rotated_width, plain_width);
        worker.run(state, piece, &queries[unit.first_row * job.key_dim], &rotated_queries[unit.first_row * key_width],
                   piece_at(following));
      }
#pragma omp barrier
      Rotator value_rotator(job.value_rotation);
      Buffer rotated(rotated_width), plain(plain_width), out(plain_width);
#pragma omp for schedule(static)
      for (std::size_t i = 0; i < unit_count; ++i) {
        const Unit& unit = units[i];
        const std::size_t blocks = blocks_of(*unit.sequence);
        const auto part_of = [&](std::size_t s) { return state_of(unit, s, blocks * (s + 1) / unit.pieces); };
        for (std::size_t r = 0; r < unit.count; ++r) {
          const std::size_t row = unit.first + r, n = unit.sequence->queries, head = unit.head * job.repeat + row / n;
          float maximum = kNever, total = 0;
          for (std::size_t s = 0; s < unit.pieces; ++s) maximum = std::max(maximum, part_of(s).maximum[r]);
          std::fill(out.data(), out.data() + plain_width, 0.0f);
          if (maximum != kNever) {
            std::fill(rotated.data(), rotated.data() + rotated_width, 0.0f);
            std::fill(plain.data(), plain.data() + plain_width, 0.0f);
            for (std::size_t s = 0; s < unit.pieces; ++s) {
              const State part = part_of(s);
              if (part.maximum[r] == kNever) continue;
              const float weight = std::exp(part.maximum[r] - maximum);
              total += weight * sum(load(&part.total[r * kLanes]));
              add_scaled(rotated.data(), &part.rotated[r * rotated_width], weight, rotated_width);
              if (part.plain) add_scaled(plain.data(), &part.plain[r * plain_width], weight, plain_width);
            }
            if (job.sink_logits) total += std::exp(job.sink_logits[head] - maximum);
            value_rotator.invert(rotated.data(), out.data(), unit.sequence->row, unit.head);
            for (std::size_t c = 0; c < job.value_dim; c += kLanes) store(&out[c], (load(&out[c]) + load(&plain[c])) / total);
          }
          const std::size_t at = head * job.out_head + row % n * job.out_token;
          for (std::size_t c = 0; c < job.value_dim; c += kLanes)
            store_some(job.out_dtype, unit.sequence->out, at + c, std::min(kLanes, job.value_dim - c),
                       rounded(job.out_dtype, load(&out[c])));
        }
      }
    }
  }
  return finite;
}

}  // namespace kvfold::KVFOLD_ISA
