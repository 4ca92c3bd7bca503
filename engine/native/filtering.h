// Which tokens of a row stay in the draw: the definition is engine/logit_filters.py.
#pragma once
#include <cstdint>
#include <vector>

#include "kernel_table.h"

namespace tandem {

struct FilterParams {
    int32_t top_k = 0;   // 0: all
    double top_p = 1.0;  // 1: all
    double min_p = 0.0;  // 0: all
};

// The smallest value of `scaled` that is kept; its largest value, 0, always is. `scratch` is grown as needed.
float keep_threshold(const FilterKernels& kernels, const float* scaled, int vocab_size, const FilterParams& params,
                     std::vector<float>& scratch);

}  // namespace tandem
