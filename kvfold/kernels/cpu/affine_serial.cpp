#define KVFOLD_ISA serial
#include "affine_impl.h"
