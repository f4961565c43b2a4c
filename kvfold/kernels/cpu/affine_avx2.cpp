#define KVFOLD_ISA avx2
#include "affine_impl.h"
