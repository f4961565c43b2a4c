#define KVFOLD_ISA serial
#include "copy_impl.h"
