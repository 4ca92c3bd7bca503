#define TANDEM_BF16_BY_FMA
#define TANDEM_BF16_BY_HALF
#include "kernels/table.h"

namespace tandem {

KernelTable avx512_fp16_kernels() { return make_table("avx512_fp16"); }

}  // namespace tandem
