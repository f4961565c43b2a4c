#define KVFOLD_ISA avx512
#include "affine_impl.h"
