#define KVFOLD_ISA avx512
#include "fold_impl.h"
