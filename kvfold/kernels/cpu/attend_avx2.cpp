#define KVFOLD_ISA avx2
#include "attend_impl.h"
