#define KVFOLD_ISA avx512
#include "attend_impl.h"
