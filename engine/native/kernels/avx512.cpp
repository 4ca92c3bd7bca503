#include "kernels/table.h"

namespace tandem {

KernelTable avx512_kernels() { return make_table("avx512"); }

}  // namespace tandem
