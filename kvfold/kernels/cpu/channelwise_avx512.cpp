#define KVFOLD_ISA avx512
#include "channelwise_impl.h"
