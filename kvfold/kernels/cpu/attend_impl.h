// The body of attention, compiled once for each instruction set: attend_serial.cpp and its siblings include it with
// KVFOLD_ISA set to their namespace.
#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <vector>

#include "dense.h"
#include "integer_keys.h"
#include "integer_values.h"
#include "page.h"
#include "plan.h"
#include "rotate.h"
#include "state.h"

namespace kvfold::KVFOLD_ISA {
namespace {

constexpr std::size_t kPages = 8;      // pages whose softmax is taken together …
constexpr std::size_t kScores = 4096;  // … unless that makes more scores than stay in cache

// Reads pieces of a unit's context into softmax states.
class Worker {
 public:
  Worker(const Attention& job, std::size_t most_rows, std::size_t most_pages)
      : job_(job),
        key_width_(job.keys.shape.head_dim + job.keys.plain_dim),
        rotated_width_(padded(job.values.shape.head_dim)),
        size_(job.keys.shape.page_size),
        scores_(Buffer::unset(std::max(most_rows * std::max(size_, kDenseBlock),
                                       std::min(most_rows * size_ * std::min(kPages, most_pages), kScores)))),
        dense_(job),
        integer_keys_(job.keys),
        integer_values_(job.values) {
    // Pages that are unfolded are read one at a time.
    const std::size_t keys = integer_keys_.fits() ? kPages : 1, values = integer_values_.fits() ? kPages : 1;
    for (std::size_t i = 0; i < std::min(keys, most_pages); ++i) key_pages_[i].emplace(job.keys, Layout::channels_first);
    for (std::size_t i = 0; i < std::min(values, most_pages); ++i) value_pages_[i].emplace(job.values, Layout::tokens_first);
  }

  // `query` and `rotated_query` are those of the rows, scaled. `following` is the next piece, without a unit if there is none.
  void run(const State& state, const Piece& piece, const float* query, const float* rotated_query, const Piece& following) {
    const Unit& unit = *piece.unit;
    if (&unit != unit_) {
      unit_ = &unit, sequence_ = unit.sequence, head_ = unit.head, first_ = unit.first, count_ = unit.count;
      for (std::size_t r = 0; r < count_; ++r) query_[r] = (first_ + r) % sequence_->queries;
      keys_ = HeadPages(job_.keys, *sequence_, head_), values_ = HeadPages(job_.values, *sequence_, head_);
    }
    if (piece.begin < sequence_->pages && integer_keys_.fits() && &unit != prepared_)
      integer_keys_.prepare(rotated_query, count_, std::min(pages_at_once(unit), sequence_->pages)), prepared_ = &unit;
    for (std::size_t block = piece.begin; block < piece.end; ++block) {
      if (block < sequence_->pages) {
        const std::size_t pages = first_pages({&unit, block, piece.end});
        const auto start = [&](std::size_t page) { return job_.pages_first + static_cast<std::int64_t>((block + page) * size_); };
        std::size_t seen = 0;
        while (seen < pages && visible(start(seen), static_cast<std::int64_t>(size_), sequence_->folded_start, sequence_->folded_stop)) ++seen;
        if (!seen) continue;
        const Piece rest{&unit, block + seen, piece.end};
        expect(block, seen, seen == pages && first_pages(rest) ? rest : following);
        read_pages(state, rotated_query, block, seen, start(0));
        ahead_.ask_for_rest();
        block += seen - 1;
      } else {
        std::size_t rest = block - sequence_->pages, at = 0;
        while (rest >= blocks_of(sequence_->spans[at])) rest -= blocks_of(sequence_->spans[at++]);
        const Span& span = sequence_->spans[at];
        const std::size_t from = rest * kDenseBlock, tokens = std::min(kDenseBlock, span.tokens - from);
        const std::int64_t start = span.first + static_cast<std::int64_t>(from);
        if (!visible(start, static_cast<std::int64_t>(tokens), span.start, span.stop)) continue;
        read_dense(state, query, start, from, tokens, span);
      }
    }
  }

 private:
  // Whether some row may read some of `tokens` positions from `start` on; `starts` and `stops` bound what each query reads.
  bool visible(std::int64_t start, std::int64_t tokens, const std::int64_t* starts, const std::int64_t* stops) const {
    for (std::size_t r = 0; r < count_; ++r) {
      const std::size_t q = query_[r];
      if (stops[q] > start && (!starts || starts[q] < start + tokens)) return true;
    }
    return false;
  }

  // How many pages are read together, so that each one's latency is hidden behind the others.
  std::size_t pages_at_once(const Unit& unit) const { return std::clamp<std::size_t>(kScores / (unit.count * size_), 1, kPages); }

  // How many pages of a piece are read first, if their tokens are visible.
  std::size_t first_pages(const Piece& piece) const {
    if (!piece.unit || piece.begin >= piece.unit->sequence->pages) return 0;
    return std::min({pages_at_once(*piece.unit), piece.unit->sequence->pages - piece.begin, piece.end - piece.begin});
  }

  // Prefetches the first pages of what follows while these pages are read. Not where pages are unfolded: there the hardware's
  // prefetcher does better.
  void expect(std::size_t first, std::size_t pages, const Piece& following) {
    if (!integer_keys_.fits() && !integer_values_.fits()) return;
    const auto expect_keys = [this](const HeadPages& keys, std::size_t from, std::size_t count) {
      if (integer_keys_.fits()) keys.expect(ahead_, from, count);
    };
    const auto expect_values = [this](const HeadPages& values, std::size_t from, std::size_t count) {
      if (integer_values_.fits()) values.expect(ahead_, from, count);
    };
    ahead_.forget();
    if (unit_ != expected_.unit || first != expected_.begin) {  // not prefetched yet
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
  }

  // Reads folded pages into the state. Each side is multiplied in integers if its codes fit them.
  void read_pages(const State& state, const float* rotated_query, std::size_t first, std::size_t pages, std::int64_t start) {
    const std::size_t tokens = pages * size_;
    read_keys(rotated_query, first, pages, tokens);
    settle(state, tokens, start, tokens, tokens, sequence_->folded_start, sequence_->folded_stop);
    read_values(state, first, pages, tokens);
  }

  void read_keys(const float* rotated_query, std::size_t first, std::size_t pages, std::size_t stride) {
    if (integer_keys_.fits()) {
      for (std::size_t page = 0; page < pages; ++page) {
        key_pages_[page]->find(keys_, first + page);
        integer_keys_.prepare_page(page, *key_pages_[page], count_, ahead_);
      }
      for (std::size_t page = 0; page < pages; ++page)
        integer_keys_.scores(page, *key_pages_[page], count_, scores_.data() + page * size_, stride, ahead_);
      return;
    }
    for (std::size_t page = 0; page < pages; ++page) {
      Page& keys = *key_pages_[0];
      keys.find(keys_, first + page), keys.unfold();
      multiply<false>(count_, key_width_, size_, rotated_query, key_width_, keys.data(), size_,
                      scores_.data() + page * size_, stride);
    }
  }

  void read_values(const State& state, std::size_t first, std::size_t pages, std::size_t stride) {
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
    dense_.score(query, count_, head_, span, from, tokens, scores_.data());
    settle(state, kDenseBlock, start, tokens, padded(tokens), span.start, span.stop);
    take_exponentials(state, kDenseBlock, padded(tokens));
    dense_.add(scores_.data(), count_, head_, span, from, tokens, state.dense);
  }

  // Raises the maxima to those of scores, whose rows lie `stride` apart, and rescales older sums to match.
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
          most[i] = larger(s, most[i]);
        }
      for (std::size_t i = 0; i < Rows; ++i) {
        const float maximum = largest(most[i]);
        maximum_[first + i] = maximum == kNever ? 0.0f : maximum;
        state.raise(first + i, maximum);
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
          const Vec p = exp_vec(load(scores + i * stride + t) - all(maximum_[first + i]));
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

  // Soft-caps the scores of row r, and sets them to -∞ where the row may not read or there is no token.
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

  // Sets 16 scores to -∞ where 16 bytes of a mask are 0.
  static KVFOLD_INLINE void hide_unseen(const std::uint8_t* mask, float* scores) {
#ifdef __AVX512F__
    const __m128i seen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(mask));
    _mm512_mask_storeu_ps(scores, _mm_testn_epi8_mask(seen, seen), __m512(all(kNever)));
#else
    for (std::size_t i = 0; i < kLanes; ++i) scores[i] = mask[i] ? scores[i] : kNever;
#endif
  }

  const Attention& job_;
  std::optional<Page> key_pages_[kPages], value_pages_[kPages];
  std::size_t key_width_, rotated_width_, size_;
  Buffer scores_;
  DenseTokens dense_;
  IntegerKeys integer_keys_;
  IntegerValues integer_values_;
  const Unit* prepared_ = nullptr;  // what the integer keys were set to last
  Ahead ahead_;
  Piece expected_;              // whose first pages were prefetched
  const Unit* unit_ = nullptr;  // that of the last piece
  const Sequence* sequence_ = nullptr;
  HeadPages keys_, values_;
  std::size_t head_ = 0, first_ = 0, count_ = 0;
  std::size_t query_[kRowBlock] = {};  // of each row
  float maximum_[kRowBlock] = {};      // of each row's scores so far, or 0 if it has read none
};

// Scales and rotates the queries of a unit's rows; returns whether all numbers are finite then. If not, all are 0.
bool prepare_queries(const Attention& job, const Unit& unit, Rotator& rotator, float* queries, float* rotated_queries) {
  const std::size_t coded = job.keys.shape.head_dim, key_width = coded + job.keys.plain_dim, n = unit.sequence->queries;
  bool finite = true;
  for (std::size_t r = 0; r < unit.count; ++r) {
    const std::size_t row = unit.first + r;
    const std::size_t from_head = (unit.head * job.repeat + row / n) * job.query_head + row % n * job.query_token;
    float *query = queries + (unit.first_row + r) * job.key_dim, *rotated = rotated_queries + (unit.first_row + r) * key_width;
    std::size_t c = 0;
    for (; c + kLanes <= job.key_dim; c += kLanes)
      store(query + c, load_some(job.query_dtype, unit.sequence->query, from_head + c, kLanes) * job.scaling);
    for (; c < job.key_dim; ++c) query[c] = from(job.query_dtype, unit.sequence->query, from_head + c) * job.scaling;
    rotator.apply_to_query(query, rotated, unit.sequence->row, unit.head);
    std::copy(query + job.key_dim - job.keys.plain_dim, query + job.key_dim, rotated + coded);
    Vec nothing{};  // NaN once a number is not finite
    for (c = 0; c < key_width; c += kLanes)
      nothing += load_some(Dtype::float32, rotated, c, std::min(kLanes, key_width - c)) * 0.0f;
    finite = finite && sum(nothing) == 0.0f;
  }
  if (!finite) {
    std::fill_n(queries + unit.first_row * job.key_dim, unit.count * job.key_dim, 0.0f);
    std::fill_n(rotated_queries + unit.first_row * key_width, unit.count * key_width, 0.0f);
  }
  return finite;
}

// Reads pieces until none is left. Each thread takes a piece before it has read the one before, to know what to prefetch; but not
// one of the last few, which other threads may be waiting for.
void read_pieces(const Attention& job, Plan& plan, std::atomic<std::size_t>& next_piece, std::size_t threads, const float* queries,
                 const float* rotated_queries) {
  const std::size_t key_width = job.keys.shape.head_dim + job.keys.plain_dim;
  Worker worker(job, plan.most_rows, plan.most_pages);
  for (std::size_t i = next_piece++, following; i < plan.pieces; i = following < plan.pieces ? following : next_piece++) {
    following = next_piece + threads <= plan.pieces ? next_piece++ : plan.pieces;
    const Piece piece = plan.piece(i);
    const Unit& unit = *piece.unit;
    const State state = plan.state(unit, i - unit.first_piece);
    state.begin(unit.count);
    worker.run(state, piece, queries + unit.first_row * job.key_dim, rotated_queries + unit.first_row * key_width,
               plan.piece(following));
  }
}

// Writes the outputs of a unit's rows: the sums of their pieces, merged and rotated back; NaN if queries are not finite.
void write_outputs(const Attention& job, Plan& plan, const Unit& unit, bool finite, Rotator& rotator, Merged& merged, Buffer& out) {
  for (std::size_t r = 0; r < unit.count; ++r) {
    const std::size_t row = unit.first + r, n = unit.sequence->queries, head = unit.head * job.repeat + row / n;
    std::fill_n(out.data(), out.size(), finite ? 0.0f : std::numeric_limits<float>::quiet_NaN());
    if (finite && merged.merge(r, unit.pieces, [&](std::size_t piece) { return plan.state(unit, piece); })) {
      const float total = merged.total + (job.sink_logits ? std::exp(job.sink_logits[head] - merged.maximum) : 0.0f);
      rotator.invert(merged.rotated.data(), out.data(), unit.sequence->row, unit.head);
      for (std::size_t c = 0; c < job.value_dim; c += kLanes)
        store(&out[c], (load(&out[c]) + load(&merged.dense[c])) / total);
    }
    const std::size_t at = head * job.out_head + row % n * job.out_token;
    for (std::size_t c = 0; c < job.value_dim; c += kLanes)
      store_some(job.out_dtype, unit.sequence->out, at + c, std::min(kLanes, job.value_dim - c),
                 rounded(job.out_dtype, load(&out[c])));
  }
}

}  // namespace

bool in_integers(const Side& side) {
  return side.shape.lanes_are_tokens ? IntegerKeys(side).fits() : IntegerValues(side).fits();
}

bool attend(const Attention& job) {
  Plan plan(job);
  const std::size_t threads = plan.threads(job.threads);
  const std::size_t key_width = job.keys.shape.head_dim + job.keys.plain_dim;
  Buffer queries = Buffer::unset(plan.rows * job.key_dim), rotated_queries = Buffer::unset(plan.rows * key_width);
  std::vector<char> whole(plan.unit_count);  // of each unit's queries
  std::atomic<std::size_t> next_piece{0};

#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    Rotator key_rotator(job.key_rotation);
#pragma omp for schedule(static)
    for (std::size_t i = 0; i < plan.unit_count; ++i)
      whole[i] = prepare_queries(job, plan.unit(i), key_rotator, queries.data(), rotated_queries.data());
    read_pieces(job, plan, next_piece, threads, queries.data(), rotated_queries.data());
#pragma omp barrier
    Rotator value_rotator(job.value_rotation);
    Merged merged(padded(job.values.shape.head_dim), padded(job.value_dim));
    Buffer out(padded(job.value_dim));
#pragma omp for schedule(static)
    for (std::size_t i = 0; i < plan.unit_count; ++i)
      write_outputs(job, plan, plan.unit(i), whole[i], value_rotator, merged, out);
  }
  return std::all_of(whole.begin(), whole.end(), [](char each) { return each; });
}

}  // namespace kvfold::KVFOLD_ISA
