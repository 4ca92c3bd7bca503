// The vector type of the instruction set that this translation unit is compiled for.
// Everything in `kernels/` stands in anonymous namespaces and uses no inline function of the standard library: code
// compiled for one instruction set must never be what the linker keeps for another.
#pragma once

#if defined(__AVX512F__)
#include "kernels/vec_avx512.h"
#elif defined(__AVX2__)
#include "kernels/vec_avx2.h"
#else
#include "kernels/vec_portable.h"
#endif
