// Which of the compiled kernel variants this processor and operating system can run.
#pragma once
#include <vector>

#include "kernel_table.h"

namespace tandem {

struct Variant {
    const char* name;
    KernelTable (*table)();
};

// Best first; never empty. The last may be for tests only: it is run by name, never chosen before `portable`.
const std::vector<Variant>& usable_variants();

}  // namespace tandem
