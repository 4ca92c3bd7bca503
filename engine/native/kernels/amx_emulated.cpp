// The AMX kernels on plain code that does what the instructions do: for tests on processors without AMX.
#define TANDEM_TILES
#define TANDEM_EMULATE_TILES
#include "kernels/table.h"

namespace tandem {

KernelTable amx_emulated_kernels() { return make_table("amx_emulated"); }

}  // namespace tandem
