// A separate library that gives MLX fast matrix products: torch's.
//
// MLX's wheels for Linux bring netlib's reference BLAS, which is slow. Once this library's symbols are global, the
// reference's `cblas_sgemm` calls this `sgemm_` instead of its own, and so torch's. Other symbols are hidden.
#define VISIBLE extern "C" __attribute__((visibility("default")))

namespace {
// BLAS's product of float32 matrices.
using Sgemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*,
                       const float*, const int*, const float*, float*, const int*);
Sgemm lent = nullptr;
}  // namespace

// To be called before symbols become global.
VISIBLE void kvfold_lend_sgemm(Sgemm sgemm) { lent = sgemm; }

VISIBLE void sgemm_(const char* transa, const char* transb, const int* m, const int* n, const int* k, const float* alpha,
                    const float* a, const int* lda, const float* b, const int* ldb, const float* beta, float* c,
                    const int* ldc) {
  lent(transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
