#define TANDEM_BF16_BY_FMA
#include "kernels/table.h"

namespace tandem {

KernelTable avx512_bf16_fma_kernels() { return make_table("avx512_bf16_fma"); }

}  // namespace tandem
