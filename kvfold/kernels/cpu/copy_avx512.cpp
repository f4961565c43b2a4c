#define KVFOLD_ISA avx512
#include "copy_impl.h"
