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

struct DotBf16 {
    static constexpr int kInputs = 2;  // inputs in one step
    using Activation = uint32_t;
    using Weights = I;
    static Weights load(const uint8_t* p) { return iload(p); }
    static F accumulate(F acc, Weights w, Activation x) { return dot_bf16_pairs(acc, w, iset1((int32_t)x)); }
};

struct DotF32 {
    static constexpr int kInputs = 1;
    using Activation = float;
    using Weights = F;
    static Weights load(const uint8_t* p) { return vload((const float*)p); }
    static F accumulate(F acc, Weights w, Activation x) { return vfma(w, vset1(x), acc); }
};

// The weights of later panels, fetched while this one is multiplied: into the first cache where the loop waits for
// memory, into the second, from farther ahead, where it waits for arithmetic. Measured on Zen 4.
template <int MR>
inline void prefetch_stream(const uint8_t* p) {
    if constexpr (MR <= 8) {
        __builtin_prefetch(p + 4096, 0, 3);
    } else {
        __builtin_prefetch(p + 16384, 0, 2);
    }
}

// Where a tile waits for memory besides its arithmetic, so that it is fetched ahead: nowhere; weights that come from
// memory (prefetch_stream); or weights and activations from the second cache, and sums on their way to memory.
enum class Fetch { kNone, kStream, kCached };

// a: step s of row m at a[s * step_stride + m * row_stride]. kContinue: sums start from `out`; add: they are added to it
// at the end; else they overwrite it.
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
        if constexpr (kFetch == Fetch::kCached) __builtin_prefetch((const uint8_t*)(a + s * step_stride) + kCachedAhead, 0, 3);
        typename Dot::Weights row[kColumns];
        for (int p = 0; p < NP; ++p) {
            for (int v = 0; v < kVectors; ++v)
                row[p * kVectors + v] = Dot::load(w + p * panel_stride + s * kRowBytes + v * kWidth * 4);
            if constexpr (kFetch == Fetch::kStream) prefetch_stream<MR>(w + p * panel_stride + s * kRowBytes);
            if constexpr (kFetch == Fetch::kCached)
                __builtin_prefetch(w + p * panel_stride + s * kRowBytes + kCachedAhead, 0, 3);
        }
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
            const typename Dot::Activation x = a[s * step_stride + m * row_stride];
#pragma GCC unroll 8
            for (int j = 0; j < kColumns; ++j) acc[m][j] = Dot::accumulate(acc[m][j], row[j], x);
        }
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
