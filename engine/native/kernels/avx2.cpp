#include "kernels/table.h"

namespace tandem {

KernelTable avx2_kernels() { return make_table("avx2"); }

}  // namespace tandem
