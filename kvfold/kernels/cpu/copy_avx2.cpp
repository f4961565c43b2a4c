#define KVFOLD_ISA avx2
#include "copy_impl.h"
