#include "kernels/table.h"

namespace tandem {

KernelTable portable_kernels() { return make_table("portable"); }

}  // namespace tandem
