// The work of a call of attention: units of query rows, and pieces of their context.
#pragma once

#include <memory>

#include "attend.h"
#include "state.h"

namespace kvfold::KVFOLD_ISA {
namespace {

constexpr std::size_t kBlocksAThread = 12;  // less work than this is not worth waking a thread
constexpr std::size_t kPiece = 16;          // blocks of a context that one thread reads at a time for few queries

// Rows `first` to `first + count` of the (repeat, queries) rows of one sequence and KV head.
struct Unit {
  const Sequence* sequence;
  std::size_t head, first, count;
  std::size_t first_row;           // place among the rows of all sequences and heads
  std::size_t pieces, first_piece;  // of the context
  std::size_t states;               // where the states of its pieces begin
};

// A part of a unit's context, in blocks: its pages, then its dense tokens.
struct Piece {
  const Unit* unit = nullptr;
  std::size_t begin = 0, end = 0;
};

// A context in blocks: pages, then blocks of dense tokens.
inline std::size_t blocks_of(const Span& span) { return (span.tokens + kDenseBlock - 1) / kDenseBlock; }

inline std::size_t blocks_of(const Sequence& sequence) {
  std::size_t blocks = sequence.pages;
  for (std::size_t i = 0; i < sequence.span_count; ++i) blocks += blocks_of(sequence.spans[i]);
  return blocks;
}

// All units of a call and the pieces of their contexts. The context of a sequence with few rows is cut into pieces, so
// that every thread has work. How it is cut depends on its length alone, so that a sequence's output depends neither on
// the other sequences nor on the number of threads.
class Plan {
 public:
  std::size_t unit_count = 0, pieces = 0, rows = 0, most_rows = 0, most_pages = 0;

  explicit Plan(const Attention& job) : rotated_width_(padded(job.values.shape.head_dim)), dense_width_(padded(job.value_dim)) {
    for (std::size_t s = 0; s < job.count; ++s) {
      const std::size_t own = job.repeat * job.sequences[s].queries;
      unit_count += job.kv_heads * ((own + kRowBlock - 1) / kRowBlock), rows += job.kv_heads * own;
    }
    units_.reset(new Unit[unit_count]);
    std::size_t first_row = 0, at = 0, room = 0;
    for (std::size_t s = 0; s < job.count; ++s) {
      const Sequence& sequence = job.sequences[s];
      const std::size_t own = job.repeat * sequence.queries, blocks = blocks_of(sequence);
      most_pages = std::max(most_pages, sequence.pages);
      const std::size_t split = own <= kRowBlock ? std::max<std::size_t>((blocks + kPiece - 1) / kPiece, 1) : 1;
      for (std::size_t head = 0; head < job.kv_heads; ++head, first_row += own)
        for (std::size_t first = 0; first < own; first += kRowBlock, pieces += split, work_ += blocks) {
          const std::size_t count = std::min(kRowBlock, own - first);
          units_[at++] = {&sequence, head, first, count, first_row + first, split, pieces, room};
          most_rows = std::max(most_rows, count), room += split * State::size(count, rotated_width_, dense_width_);
        }
    }
    unit_of_.reset(new const Unit*[pieces]);
    for (std::size_t i = 0; i < unit_count; ++i) std::fill_n(&unit_of_[units_[i].first_piece], units_[i].pieces, &units_[i]);
    states_ = Buffer::unset(room);
  }

  // As many threads as there is work for, at most `most`.
  std::size_t threads(int most) const {
    return std::min({static_cast<std::size_t>(std::max(most, 1)), std::max<std::size_t>(work_ / kBlocksAThread, 1),
                     std::max<std::size_t>(pieces, 1)});
  }

  const Unit& unit(std::size_t i) const { return units_[i]; }

  // The i-th piece of all; without a unit if there is none.
  Piece piece(std::size_t i) const {
    if (i >= pieces) return {};
    const Unit& unit = *unit_of_[i];
    const std::size_t own = i - unit.first_piece, blocks = blocks_of(*unit.sequence);
    return {&unit, blocks * own / unit.pieces, blocks * (own + 1) / unit.pieces};
  }

  // The state of a unit's piece.
  State state(const Unit& unit, std::size_t own) {
    const std::size_t end = blocks_of(*unit.sequence) * (own + 1) / unit.pieces;
    const std::size_t at = unit.states + own * State::size(unit.count, rotated_width_, dense_width_);
    return State(&states_[at], unit.count, rotated_width_, dense_width_, end > unit.sequence->pages);
  }

 private:
  std::size_t rotated_width_, dense_width_, work_ = 0;
  std::unique_ptr<Unit[]> units_;
  std::unique_ptr<const Unit*[]> unit_of_;
  Buffer states_;
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
