// Fills the table of the instruction set that this translation unit is compiled for.
#pragma once
#include "kernels/attention.h"
#if defined(__AVX512BF16__) && !defined(TANDEM_TILES)
#include "kernels/compressed_linear.h"
#endif
#include "kernels/dense_linear.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/filtering.h"
#include "kernels/floors.h"
#ifdef TANDEM_BF16_BY_HALF
#include "kernels/half_linear.h"
#endif
#include "kernels/peak.h"
#include "kernels/quantized_linear.h"
#include "kernels/sampling.h"
#ifdef TANDEM_TILES
#include "kernels/tile_linear.h"
#endif

namespace {

#ifdef TANDEM_TILES
constexpr LinearKernels kBestBf16Linear = kTileLinear<PlainWeights>;
#elif defined(TANDEM_BF16_BY_HALF)
constexpr LinearKernels kBestBf16Linear = kHalfLinear<HalfPlain>;
#else
constexpr LinearKernels kBestBf16Linear = kBf16Linear;
#endif
#if defined(TANDEM_TILES)
constexpr LinearKernels kBestCompressedLinear = kTileLinear<CompressedWeights>;
#elif defined(TANDEM_BF16_BY_HALF)
constexpr LinearKernels kBestCompressedLinear = kHalfLinear<HalfCompressed>;
constexpr LinearKernels kBf16BeyondHalf = kBf16Linear, kCompressedBeyondHalf = kCompressedLinear;
#elif defined(__AVX512BF16__)
constexpr LinearKernels kBestCompressedLinear = kCompressedLinear;
#else
constexpr LinearKernels kBestCompressedLinear = {};  // BF16 is kept as it is
#endif
#ifndef TANDEM_BF16_BY_HALF
constexpr LinearKernels kBf16BeyondHalf = {}, kCompressedBeyondHalf = {};
#endif

inline tandem::KernelTable make_table(const char* name) {
    return {name,
            {kF32Linear, kBestBf16Linear, {}, kQuantizedLinear<Q4_0Format>,
             kQuantizedLinear<Q4_1Format>, kQuantizedLinear<Q8_0Format>, kBestCompressedLinear},
            {{}, kBf16BeyondHalf, {}, {}, {}, {}, kCompressedBeyondHalf},
            &rms_norm,
            &add_bias,
            &silu_multiply,
            &rotate,
            &store_kv,
            kMostAttentionRows,
            &attention_scratch_bytes,
            &attention,
            &embed,
            &look_at,
            &gumbel_argmax,
            {&scale_row, &exponentials, &mass_at_least, &collect_at_least, &drop_below},
            &read_once,
            &multiply_in_registers};
}

}  // namespace
