#define KVFOLD_ISA serial
#include "fold_impl.h"
