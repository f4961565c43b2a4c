#define KVFOLD_ISA avx2
#include "channelwise_impl.h"
