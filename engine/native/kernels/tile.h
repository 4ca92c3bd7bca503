// The inner loop of every product: MR rows of activations times NP panels of 16 outputs, sums kept in registers.
//
// Each output is one chain of additions in order of k, whatever MR and NP are: a row's result does not depend on the
// batch it is computed in. Bytes read: NP panels once, A once per panel pair.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/vec.h"
#include "packed_matrix.h"

namespace {

using tandem::kPanelOutputs;
using tandem::kRowBytes;

constexpr int kVectors = kPanelOutputs / kWidth;  // vectors in one 64-byte row of a panel

// The most rows that share one pass over a panel (accumulators, one row of weights, broadcasts fit the registers).
constexpr int kStreamRows = kRegisters == 32 ? 16 : (kVectors == 2 ? 4 : 2);
// The most rows where two panels are taken together: for many rows, where weights come from the cache.
constexpr int kPairRows = kRegisters == 32 ? 12 : 2;
constexpr size_t kCachedAhead = 8 * kRowBytes;  // of weights and activations that come from the second cache

// A step takes one vector of weights from memory and multiplies it in `kParts` parts, each with one activation.
struct DotPairs {
    static constexpr int kInputs = 2;  // inputs in one step
    static constexpr int kParts = 1;
    using Activation = uint32_t;
    using Weights = I;
    using Factor = I;
    static Weights load(const uint8_t* p) { return iload(p); }
    template <int>
    static Factor part(Weights w) {
        return w;
    }
    static F accumulate(F acc, Factor w, Activation x) { return dot_bf16_pairs(acc, w, iset1((int32_t)x)); }
};

struct DotF32 {
    static constexpr int kInputs = 1;
    static constexpr int kParts = 1;
    using Activation = float;
    using Weights = F;
    using Factor = F;
    static Weights load(const uint8_t* p) { return vload((const float*)p); }
    template <int>
    static Factor part(Weights w) {
        return w;
    }
    static F accumulate(F acc, Factor w, Activation x) { return vfma(w, vset1(x), acc); }
};

#ifdef TANDEM_BF16_BY_FMA
// Pairs of bfloat16 weights widened in registers, two float32 FMAs instead of one product of pairs: a product of two
// bfloat16 values is exact in float32, so each sum is rounded once for each input. Activations are floats that were
// rounded to bfloat16.
struct DotWidened {
    static constexpr int kInputs = 2;
    static constexpr int kParts = 2;
    using Activation = float;
    using Weights = I;
    using Factor = F;
    static Weights load(const uint8_t* p) { return iload(p); }
    template <int kPart>
    static Factor part(Weights w) {
        return kPart == 0 ? vwiden_low(w) : vwiden_high(w);
    }
    static F accumulate(F acc, Factor w, Activation x) { return vfma(w, vset1(x), acc); }
};
using DotBf16 = DotWidened;

// The same where the weights have been widened in memory.
struct DotWidenedBefore : DotF32 {};
#else
using DotBf16 = DotPairs;
#endif

// Activations that a row has for `inputs` of its inputs.
template <class Dot>
constexpr size_t activations_of(int inputs) {
    return (size_t)(inputs / Dot::kInputs * Dot::kParts);
}

// The weights of later panels, fetched while this one is multiplied.
template <int MR>
inline void prefetch_stream(const uint8_t* p) {
#ifdef TANDEM_BF16_BY_FMA
    // From far ahead into the second cache, which has more requests under way than the first, then into the first.
    // Measured on an Intel core of 12 GB/s: one row 12.1 GB/s, with the first cache alone 10.6 to 11.4.
    __builtin_prefetch(p + 16384, 0, 2);
    if constexpr (MR <= 8) __builtin_prefetch(p + 1024, 0, 3);
#else
    // Into the first cache where the loop waits for memory, into the second, from farther ahead, where it waits for
    // arithmetic. Measured on Zen 4.
    if constexpr (MR <= 8) {
        __builtin_prefetch(p + 4096, 0, 3);
    } else {
        __builtin_prefetch(p + 16384, 0, 2);
    }
#endif
}

// Where a tile waits for memory besides its arithmetic, so that it is fetched ahead: nowhere; weights that come from
// memory (prefetch_stream); or weights and activations from the second cache, and sums on their way to memory.
enum class Fetch { kNone, kStream, kCached };

// The products of one vector of weights: of MR rows, each of its parts with one activation,
// a[part * step_stride + m * row_stride].
template <class Dot, int MR, int kColumns, int kPart = 0>
inline __attribute__((always_inline)) void multiply_step(F (&acc)[MR][kColumns],
                                                         const typename Dot::Weights (&row)[kColumns],
                                                         const typename Dot::Activation* a, size_t step_stride,
                                                         size_t row_stride) {
    typename Dot::Factor factor[kColumns];
    for (int j = 0; j < kColumns; ++j) factor[j] = Dot::template part<kPart>(row[j]);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
        const typename Dot::Activation x = a[m * row_stride];
#pragma GCC unroll 8
        for (int j = 0; j < kColumns; ++j) acc[m][j] = Dot::accumulate(acc[m][j], factor[j], x);
    }
    if constexpr (kPart + 1 < Dot::kParts)
        multiply_step<Dot, MR, kColumns, kPart + 1>(acc, row, a + step_stride, step_stride, row_stride);
}

// a: part i of step s of row m at a[(s * kParts + i) * step_stride + m * row_stride]. kContinue: sums start from `out`;
// add: they are added to it at the end; else they overwrite it.
template <class Dot, int MR, int NP, Fetch kFetch, bool kContinue>
inline __attribute__((always_inline)) void multiply_tile(const typename Dot::Activation* a, size_t step_stride,
                                                         size_t row_stride, const uint8_t* w, size_t panel_stride,
                                                         int steps, float* out, size_t out_stride, bool add) {
    constexpr int kColumns = NP * kVectors;
    F acc[MR][kColumns];
    for (int m = 0; m < MR; ++m)
        for (int j = 0; j < kColumns; ++j)
            acc[m][j] = kContinue ? vload(out + m * out_stride + j * kWidth) : vzero();
    if constexpr (kFetch == Fetch::kCached)
        for (int m = 0; m < MR; ++m)
            for (int p = 0; p < NP; ++p) __builtin_prefetch(out + m * out_stride + p * kPanelOutputs, 1, 3);
    for (int s = 0; s < steps; ++s) {
        const typename Dot::Activation* x = a + s * Dot::kParts * step_stride;
        if constexpr (kFetch == Fetch::kCached) __builtin_prefetch((const uint8_t*)x + kCachedAhead, 0, 3);
        typename Dot::Weights row[kColumns];
        for (int p = 0; p < NP; ++p) {
            for (int v = 0; v < kVectors; ++v)
                row[p * kVectors + v] = Dot::load(w + p * panel_stride + s * kRowBytes + v * kWidth * 4);
            if constexpr (kFetch == Fetch::kStream) prefetch_stream<MR>(w + p * panel_stride + s * kRowBytes);
            if constexpr (kFetch == Fetch::kCached)
                __builtin_prefetch(w + p * panel_stride + s * kRowBytes + kCachedAhead, 0, 3);
        }
        multiply_step<Dot, MR, kColumns>(acc, row, x, step_stride, row_stride);
    }
    for (int m = 0; m < MR; ++m)
        for (int j = 0; j < kColumns; ++j) {
            float* to = out + m * out_stride + j * kWidth;
            vstore(to, add ? vadd(vload(to), acc[m][j]) : acc[m][j]);
        }
}

// `rows` in blocks of nearly equal size, none above `most`: the first blocks have `size` rows, the last the rest.
struct RowBlocks {
    int count;
    int size;
    static RowBlocks of_size(int rows, int size) {
        RowBlocks blocks(rows, size);
        blocks.size = size;
        return blocks;
    }
    RowBlocks(int rows, int most) : count((rows + most - 1) / most), size(count ? (rows + count - 1) / count : 0) {}
};

// The function of a table with one entry for each number of rows, 1 to sizeof...(Is).
template <class Maker, size_t... Is>
constexpr auto by_rows(std::index_sequence<Is...>) {
    struct Table {
        decltype(Maker::template function<1>()) entry[sizeof...(Is) + 1];
    };
    return Table{{nullptr, Maker::template function<(int)Is + 1>()...}};
}

}  // namespace
