#include "kernels/table.h"

namespace tandem {

KernelTable avx512_bf16_kernels() { return make_table("avx512_bf16"); }

}  // namespace tandem
