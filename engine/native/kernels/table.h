// Fills the table of the instruction set that this translation unit is compiled for.
#pragma once
#include "kernels/attention.h"
#include "kernels/dense_linear.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/quantized_linear.h"

namespace {

inline tandem::KernelTable make_table(const char* name) {
    return {name,
            {kF32Linear, kBf16Linear, {}, kQuantizedLinear<Q4_0Format>,
             kQuantizedLinear<Q4_1Format>, kQuantizedLinear<Q8_0Format>},
            &rms_norm,
            &add_bias,
            &silu_multiply,
            &rotate,
            &store_kv,
            &attention_scratch_bytes,
            &attention,
            &embed};
}

}  // namespace
