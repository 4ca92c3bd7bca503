// Which of the compiled kernel variants this processor and operating system can run.
#pragma once
#include <string>
#include <vector>

#include "kernel_table.h"

namespace tandem {

struct Variant {
    const char* name;
    KernelTable (*table)();
};

// Best first; never empty.
std::vector<Variant> usable_variants();

}  // namespace tandem
