// Copies dense numbers into storage of a cache: kvfold/kernels/cpu/copy.py.
#pragma once

#include "attend.h"

namespace kvfold {

// (batch, heads, tokens, dim), coordinates side by side; strides in elements.
struct Numbers {
  const void* data = nullptr;
  std::size_t batch = 0, head = 0, token = 0;
  Dtype dtype = Dtype::float32;
};

struct Copy {
  Numbers from, to;
  std::size_t batch = 0, heads = 0, tokens = 0, dim = 0;
};

// Copies numbers; returns whether all are finite as they are written.
namespace serial {
bool copy(const Copy& job);
}
namespace avx2 {
bool copy(const Copy& job);
}
namespace avx512 {
bool copy(const Copy& job);
}

}  // namespace kvfold
