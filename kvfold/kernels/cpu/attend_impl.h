// The body of attention, compiled once for each instruction set: attend_serial.cpp and its siblings include it with
// KVFOLD_ISA set to their namespace.
#include <memory>

#include "integer_keys.h"
#include "integer_values.h"
#include "page.h"
#include "rotate.h"

namespace kvfold::KVFOLD_ISA {
namespace {

constexpr std::size_t kBlocksAThread = 24;  // less work than this is not worth waking a thread
constexpr std::size_t kPiece = 16;          // blocks of a context that one thread reads at a time for few queries

// Softmax state of a block of query rows.
struct State {
  Buffer rotated, plain, maximum, total;  // total: in 16 parts
  explicit State(std::size_t rows = 0, std::size_t rotated_width = 0, std::size_t plain_width = 0)
      : rotated(rows * rotated_width),
        plain(rows * plain_width),
        maximum(rows, kNever),
        total(rows * kLanes) {}
};

// Of one sequence and KV head: rows `first` to `first + count` of its (repeat, queries) rows.
struct Unit {
  const Sequence* sequence;
  std::size_t head, first, count;
  std::size_t first_row;           // of the rows of all sequences and heads
  std::size_t pieces, first_state;  // of the context, and of their states
};

// Units over some blocks of their keys.
class Worker {
 public:
  Worker(const Attention& job, std::size_t most_rows)
      : job_(job),
        key_page_(job.keys, Layout::channels_first),
        value_page_(job.values, Layout::tokens_first),
        key_width_(job.keys.shape.head_dim + job.keys.plain_dim),
        rotated_width_(padded(job.values.shape.head_dim)),
        plain_width_(padded(job.value_dim)),
        size_(job.keys.shape.page_size),
        scores_(most_rows * std::max(size_, kDenseBlock))
#ifdef __AVX512VNNI__
        ,
        integer_keys_(key_page_),
        integer_values_(value_page_)
#endif
  {
  }

  // `query` and `rotated_query` are those of the rows, scaled.
  void run(State& state, const Unit& unit, const float* query, const float* rotated_query, std::size_t block_begin,
           std::size_t block_end) {
    sequence_ = unit.sequence, head_ = unit.head, first_ = unit.first, count_ = unit.count;
    for (std::size_t r = 0; r < count_; ++r) query_[r] = (first_ + r) % sequence_->queries;
#ifdef __AVX512VNNI__
    if (integer_keys_.fits() && block_begin < sequence_->pages) integer_keys_.prepare(rotated_query, count_);
#endif
    for (std::size_t block = block_begin; block < block_end; ++block) {
      if (block < sequence_->pages) {
        const std::int64_t start = job_.pages_first + static_cast<std::int64_t>(block * size_);
        if (!visible(start, static_cast<std::int64_t>(size_), nullptr, sequence_->folded_stop)) continue;
        read_page(state, rotated_query, block, start);
      } else {
        std::size_t rest = block - sequence_->pages, at = 0;
        while (rest >= blocks(sequence_->spans[at])) rest -= blocks(sequence_->spans[at++]);
        const Span& span = sequence_->spans[at];
        const std::size_t from = rest * kDenseBlock, tokens = std::min(kDenseBlock, span.tokens - from);
        const std::int64_t start = span.first + static_cast<std::int64_t>(from);
        if (!visible(start, static_cast<std::int64_t>(tokens), span.start, span.stop)) continue;
        unpack(span, from, tokens);
        read_dense(state, query, start, tokens, span);
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

  // Keys as [channel][token], values as [token][channel].
  void unpack(const Span& span, std::size_t from_token, std::size_t tokens) {
    if (!dense_key_.size()) dense_key_ = Buffer(job_.key_dim * kDenseBlock), dense_value_ = Buffer(kDenseBlock * plain_width_);
    const std::size_t key_at = head_ * span.key_head + from_token * span.key_token;
    const std::size_t value_at = head_ * span.value_head + from_token * span.value_token;
    for (std::size_t first = 0; first < tokens; first += kLanes) {
      const std::size_t here = std::min(kLanes, tokens - first);
      for (std::size_t c = 0; c < job_.key_dim; c += kLanes) {
        const std::size_t channels = std::min(kLanes, job_.key_dim - c);
        Vec lines[kLanes] = {};
        for (std::size_t t = 0; t < here; ++t)
          lines[t] = load_some(span.dtype, span.key, key_at + (first + t) * span.key_token + c, channels);
        transpose(lines);
        for (std::size_t i = 0; i < channels; ++i) store(&dense_key_[(c + i) * kDenseBlock + first], lines[i]);
      }
    }
    for (std::size_t t = 0; t < tokens; ++t)
      for (std::size_t c = 0; c < job_.value_dim; c += kLanes)
        store(&dense_value_[t * plain_width_ + c], load_some(span.dtype, span.value, value_at + t * span.value_token + c,
                                                             std::min(kLanes, job_.value_dim - c)));
  }

  // Reads a folded page into the state: either side in integers, if its codes fit them.
  void read_page(State& state, const float* rotated_query, std::size_t page, std::int64_t start) {
    float* scores = scores_.data();
    const std::uint8_t* code = key_page_.find(*sequence_, head_, page);
#ifdef __AVX512VNNI__
    if (integer_keys_.fits()) {
      integer_keys_.scores(code, count_, scores);
    } else
#endif
    {
      key_page_.unfold(code);
      multiply<false>(count_, key_width_, size_, rotated_query, key_width_, key_page_.data(), size_, scores, size_);
    }
    code = value_page_.find(*sequence_, head_, page);
    for (std::size_t r = 0; r < count_; ++r) weigh(state, r, scores + r * size_, start, size_, size_, nullptr, sequence_->folded_stop);
    float* sums = state.rotated.data();
#ifdef __AVX512VNNI__
    if (integer_values_.fits()) {
      integer_values_.add(code, count_, scores, sums);
      return;
    }
#endif
    value_page_.unfold(code);
    multiply<true>(count_, size_, rotated_width_, scores, size_, value_page_.data(), rotated_width_, sums, rotated_width_);
  }

  // Reads the dense keys and values that were unpacked last.
  void read_dense(State& state, const float* query, std::int64_t start, std::size_t tokens, const Span& span) {
    float* scores = scores_.data();
    const std::size_t width = padded(tokens);
    multiply<false>(count_, job_.key_dim, width, query, job_.key_dim, dense_key_.data(), kDenseBlock, scores, kDenseBlock);
    for (std::size_t r = 0; r < count_; ++r)
      weigh(state, r, scores + r * kDenseBlock, start, tokens, width, span.start, span.stop);
    multiply<true>(count_, tokens, plain_width_, scores, kDenseBlock, dense_value_.data(), plain_width_,
                   state.plain.data(), plain_width_);
  }

  // Scores of one row to unnormalised probabilities, in place; older sums are rescaled to match.
  void weigh(State& state, std::size_t r, float* scores, std::int64_t start, std::size_t tokens, std::size_t stride,
             const std::int64_t* starts, const std::int64_t* stops) const {
    const std::size_t q = query_[r];
    if (job_.softcap != 0.0f)
      for (std::size_t t = 0; t < tokens; ++t) scores[t] = job_.softcap * std::tanh(scores[t] / job_.softcap);
    const auto clamp = [&](std::int64_t position) {
      return static_cast<std::size_t>(std::clamp<std::int64_t>(position - start, 0, static_cast<std::int64_t>(tokens)));
    };
    const std::size_t low = starts ? clamp(starts[q]) : 0, high = clamp(stops[q]);
    for (std::size_t t = 0; t < low; ++t) scores[t] = kNever;
    for (std::size_t t = high; t < stride; ++t) scores[t] = kNever;
    if (job_.mask) {
      const std::size_t head = head_ * job_.repeat + (first_ + r) / sequence_->queries;
      const std::uint8_t* mask = job_.mask + sequence_->row * job_.mask_batch + head * job_.mask_head + q * job_.mask_query;
      for (std::size_t t = 0; t < stride; t += kLanes) {
        const std::int64_t left = job_.mask_columns - (start + static_cast<std::int64_t>(t));
        Flags flags{};
        if (left > 0) std::memcpy(&flags, mask + start + t, std::min<std::size_t>(kLanes, static_cast<std::size_t>(left)));
        store(scores + t, __builtin_convertvector(flags, Ints) != 0 ? load(scores + t) : all(kNever));
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
    Vec total = load(&state.total[r * kLanes]);
    const bool grown = maximum > state.maximum[r];
    const float decay = !grown ? 1.0f : state.maximum[r] == kNever ? 0.0f : std::exp(state.maximum[r] - maximum);
    if (grown) total *= decay;
#pragma GCC unroll 4
    for (std::size_t t = 0; t < stride; t += kLanes) {
      const Vec p = exp_vec(load(scores + t) - maximum);
      store(scores + t, p);
      total += p;
    }
    store(&state.total[r * kLanes], total);
    if (grown) {
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
  std::size_t key_width_, rotated_width_, plain_width_, size_;
  Buffer scores_, dense_key_, dense_value_;
#ifdef __AVX512VNNI__
  IntegerKeys integer_keys_;
  IntegerValues integer_values_;
#endif
  const Sequence* sequence_ = nullptr;
  std::size_t head_ = 0, first_ = 0, count_ = 0;
  std::size_t query_[kRowBlock] = {};  // of each row
};

}  // namespace

bool in_integers([[maybe_unused]] const Side& side) {
#ifdef __AVX512VNNI__
  const Page page(side, side.shape.lanes_are_tokens ? Layout::channels_first : Layout::tokens_first);
  return side.shape.lanes_are_tokens ? IntegerKeys(page).fits() : IntegerValues(page).fits();
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
  std::size_t pieces = 0, work = 0, most_rows = 0, first_row = 0, at = 0;
  for (std::size_t s = 0; s < job.count; ++s) {
    const Sequence& sequence = job.sequences[s];
    const std::size_t own = job.repeat * sequence.queries, blocks = blocks_of(sequence);
    const std::size_t split = own <= kRowBlock ? std::max<std::size_t>((blocks + kPiece - 1) / kPiece, 1) : 1;
    for (std::size_t head = 0; head < job.kv_heads; ++head, first_row += own)
      for (std::size_t first = 0; first < own; first += kRowBlock, pieces += split, work += blocks) {
        const std::size_t count = std::min(kRowBlock, own - first);
        units[at++] = {&sequence, head, first, count, first_row + first, split, pieces};
        most_rows = std::max(most_rows, count);
      }
  }
  const std::unique_ptr<State[]> states(new State[pieces]);
  const std::unique_ptr<const Unit*[]> unit_of(new const Unit*[pieces]);
  for (std::size_t i = 0; i < unit_count; ++i)
    std::fill_n(&unit_of[units[i].first_state], units[i].pieces, &units[i]);
  const std::size_t threads = std::min({static_cast<std::size_t>(std::max(job.threads, 1)), std::max<std::size_t>(work / kBlocksAThread, 1),
                                        std::max<std::size_t>(pieces, 1)});
  Buffer queries(rows * job.key_dim), rotated_queries(rows * key_width);
  bool finite = true;

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
        for (std::size_t c = 0; c < job.key_dim; ++c) query[c] = from(job.query_dtype, unit.sequence->query, from_head + c) * job.scaling;
        key_rotator.apply_to_query(query, rotated, unit.sequence->row, unit.head);
        std::copy(query + job.key_dim - job.keys.plain_dim, query + job.key_dim, rotated + coded);
        float nothing = 0;  // NaN once a number is not finite
        for (std::size_t c = 0; c < key_width; ++c) nothing += rotated[c] * 0.0f;
        finite = finite && nothing == 0.0f;
      }
    }
    if (finite) {
      Worker worker(job, most_rows);
#pragma omp for schedule(dynamic)
      for (std::size_t i = 0; i < pieces; ++i) {
        const Unit& unit = *unit_of[i];
        const std::size_t piece = i - unit.first_state, blocks = blocks_of(*unit.sequence);
        states[i] = State(unit.count, rotated_width, plain_width);
        worker.run(states[i], unit, &queries[unit.first_row * job.key_dim], &rotated_queries[unit.first_row * key_width],
                   blocks * piece / unit.pieces, blocks * (piece + 1) / unit.pieces);
      }
      Rotator value_rotator(job.value_rotation);
      Buffer rotated(rotated_width), plain(plain_width);
#pragma omp for schedule(static)
      for (std::size_t i = 0; i < unit_count; ++i) {
        const Unit& unit = units[i];
        const State* parts = &states[unit.first_state];
        for (std::size_t r = 0; r < unit.count; ++r) {
          const std::size_t row = unit.first + r, n = unit.sequence->queries, head = unit.head * job.repeat + row / n;
          float* out = unit.sequence->out + head * job.out_head + row % n * job.out_token;
          float maximum = kNever, total = 0;
          for (std::size_t s = 0; s < unit.pieces; ++s) maximum = std::max(maximum, parts[s].maximum[r]);
          std::fill(out, out + job.value_dim, 0.0f);
          if (maximum == kNever) continue;
          std::fill(rotated.data(), rotated.data() + rotated_width, 0.0f);
          std::fill(plain.data(), plain.data() + plain_width, 0.0f);
          for (std::size_t s = 0; s < unit.pieces; ++s) {
            const State& part = parts[s];
            if (part.maximum[r] == kNever) continue;
            const float weight = std::exp(part.maximum[r] - maximum);
            total += weight * sum(load(&part.total[r * kLanes]));
            add_scaled(rotated.data(), &part.rotated[r * rotated_width], weight, rotated_width);
            add_scaled(plain.data(), &part.plain[r * plain_width], weight, plain_width);
          }
          if (job.sink_logits) total += std::exp(job.sink_logits[head] - maximum);
          value_rotator.invert(rotated.data(), out, unit.sequence->row, unit.head);
          for (std::size_t c = 0; c < job.value_dim; ++c) out[c] = (out[c] + plain[c]) / total;
        }
      }
    }
  }
  return finite;
}

}  // namespace kvfold::KVFOLD_ISA
