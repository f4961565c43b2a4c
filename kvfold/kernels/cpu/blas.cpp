// Matrix products for who has no fast ones of his own.
//
// MLX's wheels for Linux bring netlib's reference BLAS (4 GFLOP/s on a core). Once this module's symbols are global,
// the reference's `cblas_sgemm` finds this `sgemm_` in the place of its own, and so torch's.
#include "blas.h"

namespace {
kvfold::Sgemm lent = nullptr;
}

namespace kvfold {
void lend(Sgemm sgemm) { lent = sgemm; }
}  // namespace kvfold

extern "C" __attribute__((visibility("default"))) void sgemm_(const char* transa, const char* transb, const int* m,
                                                              const int* n, const int* k, const float* alpha,
                                                              const float* a, const int* lda, const float* b,
                                                              const int* ldb, const float* beta, float* c,
                                                              const int* ldc) {
  lent(transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
