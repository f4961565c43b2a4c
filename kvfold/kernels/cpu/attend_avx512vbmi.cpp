#define KVFOLD_ISA avx512vbmi
#include "attend_impl.h"
