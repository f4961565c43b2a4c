// Body of copy; each copy_<set>.cpp compiles it under its own name.
#include "copy.h"
#include "dtypes.h"

namespace kvfold::KVFOLD_ISA {

bool copy(const Copy& job) {
  Vec nothing{};  // NaN in a lane once a number is not finite
  for (std::size_t b = 0; b < job.batch; ++b)
    for (std::size_t h = 0; h < job.heads; ++h)
      for (std::size_t t = 0; t < job.tokens; ++t) {
        const std::size_t from = b * job.from.batch + h * job.from.head + t * job.from.token;
        const std::size_t to = b * job.to.batch + h * job.to.head + t * job.to.token;
        for (std::size_t c = 0; c < job.dim; c += kLanes) {
          const std::size_t count = std::min(kLanes, job.dim - c);
          const Vec v = rounded(job.to.dtype, load_some(job.from.dtype, job.from.data, from + c, count));
          nothing += v * 0.0f;
          store_some(job.to.dtype, const_cast<void*>(job.to.data), to + c, count, v);
        }
      }
  return sum(nothing) == 0.0f;
}

}  // namespace kvfold::KVFOLD_ISA
