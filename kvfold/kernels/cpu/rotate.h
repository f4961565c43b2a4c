// R of the page form, applied to rows of floats. kvfold/quant/transforms.py says what the kinds are.
#pragma once

#include "vectors.h"

namespace kvfold::KVFOLD_ISA {
namespace {

// One butterfly between lanes that are Half apart: a + b below, a - b above.
template <int Half>
inline Vec butterfly(Vec v) {
  Vec sign;
  for (int lane = 0; lane < int{kLanes}; ++lane) sign[lane] = lane & Half ? -1.0f : 1.0f;
  return v * sign + partners<Half>(v);
}

// Walsh–Hadamard transforms of Vecs · 16 numbers, in registers: to = by · after ⊙ H·(before ⊙ from); null for no signs.
template <std::size_t Vecs>
inline void walsh_hadamard_of(const float* from, const float* before, float* to, const float* after, float by) {
  Vec v[Vecs];
  each<Vecs>([&](auto i) KVFOLD_LAMBDA {
    v[i] = load(from + i * kLanes) * all(by);
    if (before) v[i] *= load(before + i * kLanes);
    v[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(v[i]))));
  });
  const auto exchange_halves = [&](auto half) KVFOLD_LAMBDA {
    each<Vecs>([&](auto i) KVFOLD_LAMBDA {
      if constexpr (half < Vecs && !(i & half)) {
        const Vec a = v[i], b = v[i + half];
        v[i] = a + b, v[i + half] = a - b;
      }
    });
  };
  exchange_halves(std::integral_constant<std::size_t, 1>{}), exchange_halves(std::integral_constant<std::size_t, 2>{});
  exchange_halves(std::integral_constant<std::size_t, 4>{}), exchange_halves(std::integral_constant<std::size_t, 8>{});
  each<Vecs>([&](auto i) KVFOLD_LAMBDA {
    if (after) v[i] *= load(after + i * kLanes);
    store(to + i * kLanes, v[i]);
  });
}

// The same for n = 2^k numbers; `to` may be `from`.
inline void walsh_hadamard(std::size_t n, const float* from, const float* before, float* to, const float* after, float by) {
  constexpr std::size_t most = 16;  // vectors that a transform has registers for
  if (n == kLanes) return walsh_hadamard_of<1>(from, before, to, after, by);
  if (n == 2 * kLanes) return walsh_hadamard_of<2>(from, before, to, after, by);
  if (n == 4 * kLanes) return walsh_hadamard_of<4>(from, before, to, after, by);
  if (n == 8 * kLanes) return walsh_hadamard_of<8>(from, before, to, after, by);
  if (n == most * kLanes) return walsh_hadamard_of<most>(from, before, to, after, by);
  if (n > most * kLanes) {
    for (std::size_t i = 0; i < n; i += most * kLanes)
      walsh_hadamard_of<most>(from + i, before ? before + i : nullptr, to + i, nullptr, by);
    for (std::size_t half = most * kLanes; half < n; half *= 2)
      for (std::size_t first = 0; first < n; first += 2 * half)
        for (std::size_t i = first; i < first + half; i += kLanes) {
          const Vec a = load(to + i), b = load(to + i + half);
          store(to + i, a + b), store(to + i + half, a - b);
        }
    for (std::size_t i = 0; after && i < n; i += kLanes) store(to + i, load(to + i) * load(after + i));
    return;
  }
  for (std::size_t i = 0; i < n; ++i) to[i] = from[i] * (before ? by * before[i] : by);
  for (std::size_t half = 1; half < n; half *= 2)
    for (std::size_t first = 0; first < n; first += 2 * half)
      for (std::size_t i = first; i < first + half; ++i) {
        const float a = to[i], b = to[i + half];
        to[i] = a + b, to[i + half] = a - b;
      }
  for (std::size_t i = 0; after && i < n; ++i) to[i] *= after[i];
}

inline float dot(const float* a, const float* b, std::size_t n) {
  Vec lanes{};
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) lanes += load(a + i) * load(b + i);
  float rest = 0;
  for (; i < n; ++i) rest += a[i] * b[i];
  return sum(lanes) + rest;
}

inline void add_scaled(float* to, const float* from, float by, std::size_t n) {
  const Vec times = all(by);
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(to + i) + load(from + i) * times);
  for (; i < n; ++i) to[i] += from[i] * by;
}

// y = A·x, or Aᵀ·x, for A of shape (rows, columns).
inline void multiply_matrix(const float* a, std::size_t rows, std::size_t columns, const float* x, float* y) {
  std::size_t r = 0;
  for (; r + kBlock <= rows && columns % kLanes == 0; r += kBlock) {
    Vec lanes[kBlock] = {};
    for (std::size_t c = 0; c < columns; c += kLanes)
      for (std::size_t i = 0; i < kBlock; ++i) lanes[i] += load(a + (r + i) * columns + c) * load(x + c);
    store(y + r, sum_four(lanes));
  }
  for (; r < rows; ++r) y[r] = dot(a + r * columns, x, columns);
}
inline void multiply_transposed(const float* a, std::size_t rows, std::size_t columns, const float* x, float* y) {
#ifdef __AVX512F__  // elsewhere registers do not hold the sums
  if (columns % kLanes == 0) return multiply<false>(1, rows, columns, x, rows, a, columns, y, columns);
#endif
  std::fill(y, y + columns, 0.0f);
  for (std::size_t r = 0; r < rows; ++r) add_scaled(y, a + r * columns, x[r], columns);
}

class Rotator {
 public:
  explicit Rotator(const Rotation& rotation) : rotation_(rotation), scratch_(rotation.dim) {}

  // R·x: x has dim numbers, y code_dim; they do not overlap.
  void apply(const float* x, float* y, std::size_t batch, std::size_t head) {
    switch (rotation_.kind) {
      case RotationKind::order: {
        const std::int16_t* order = order_of(batch, head);
        for (std::size_t i = 0; i < rotation_.dim; ++i) y[i] = x[order[i]];
        return;
      }
      case RotationKind::hadamard:
        for (std::size_t i = 0; i < rotation_.dim; i += rotation_.power)
          walsh_hadamard(rotation_.power, x + i, rotation_.signs + i, y + i, nullptr, unit());
        return mix(y, false);
      case RotationKind::matrix:
        if (rotation_.order) {
          const std::int16_t* order = order_of(batch, head);
          for (std::size_t i = 0; i < rotation_.dim; ++i) scratch_[i] = x[order[i]];
          x = scratch_.data();
        }
        return multiply_matrix(matrix_of(head), rotation_.code_dim, rotation_.dim, x, y);
    }
  }

  // q̃ = R⁻ᵀ·q
  void apply_to_query(const float* q, float* y, std::size_t batch, std::size_t head) {
    if (rotation_.kind == RotationKind::matrix && rotation_.inverse)
      return multiply_transposed(rotation_.inverse, rotation_.dim, rotation_.code_dim, q, y);
    apply(q, y, batch, head);
  }

  // x = R⁻¹·y; y may change.
  void invert(float* y, float* x, std::size_t batch, std::size_t head) {
    switch (rotation_.kind) {
      case RotationKind::order: {
        const std::int16_t* order = order_of(batch, head);
        for (std::size_t i = 0; i < rotation_.dim; ++i) x[order[i]] = y[i];
        return;
      }
      case RotationKind::hadamard:
        mix(y, true);
        for (std::size_t i = 0; i < rotation_.dim; i += rotation_.power)
          walsh_hadamard(rotation_.power, y + i, nullptr, x + i, rotation_.signs + i, unit());
        return;
      case RotationKind::matrix:
        if (rotation_.inverse) return multiply_matrix(rotation_.inverse, rotation_.dim, rotation_.code_dim, y, x);
        if (!rotation_.order) return multiply_transposed(matrix_of(head), rotation_.code_dim, rotation_.dim, y, x);
        multiply_transposed(matrix_of(head), rotation_.code_dim, rotation_.dim, y, scratch_.data());
        for (std::size_t i = 0; i < rotation_.dim; ++i) x[order_of(batch, head)[i]] = scratch_[i];
        return;
    }
  }

 private:
  const float* matrix_of(std::size_t head) const { return rotation_.matrix + head * rotation_.matrix_head; }

  const std::int16_t* order_of(std::size_t batch, std::size_t head) const {
    return rotation_.order + batch * rotation_.order_batch + head * rotation_.order_head;
  }

  // The factor that makes a block's transform orthogonal.
  float unit() const { return 1.0f / std::sqrt(static_cast<float>(rotation_.power)); }

  // Q ⊗ I, or its transpose, over blocks of `power`.
  void mix(float* y, bool transposed) {
    const std::size_t power = rotation_.power, m = rotation_.dim / power;
    if (m == 1) return;
    std::copy(y, y + rotation_.dim, scratch_.data());
    std::fill(y, y + rotation_.dim, 0.0f);
    for (std::size_t a = 0; a < m; ++a)
      for (std::size_t b = 0; b < m; ++b)
        add_scaled(y + a * power, scratch_.data() + b * power, rotation_.mix[transposed ? b * m + a : a * m + b], power);
  }

  const Rotation& rotation_;
  Buffer scratch_;
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
