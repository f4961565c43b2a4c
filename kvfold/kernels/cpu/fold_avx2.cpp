#define KVFOLD_ISA avx2
#include "fold_impl.h"
