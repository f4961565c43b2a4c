#define KVFOLD_ISA serial
#include "channelwise_impl.h"
