#define KVFOLD_ISA avx512vnni
#include "attend_impl.h"
