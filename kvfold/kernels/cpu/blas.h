// See blas.cpp.
#pragma once

namespace kvfold {

// BLAS's product of float32 matrices.
using Sgemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*,
                       const float*, const int*, const float*, float*, const int*);

// Let `sgemm_` of this module be `sgemm`.
void lend(Sgemm sgemm);

}  // namespace kvfold
