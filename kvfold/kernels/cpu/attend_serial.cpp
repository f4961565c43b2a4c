#define KVFOLD_ISA serial
#include "attend_impl.h"
