// Products of many rows with bfloat16 weights by float32 FMAs: a pair of panels is widened to floats once, a part of its
// inputs at a time, and stays in the first cache while all rows are multiplied with it.
//
//   for each group of rows whose activations fit the second cache:
//     for each pair of panels:
//       for each part of the inputs:  widen it into the scratch; for each block of rows: sums += products
//
// A row's sum is one chain of additions in order of k: what a part leaves behind is where the next one starts.
#pragma once
#include "kernel_table.h"
#include "kernels/tile.h"

namespace {

using tandem::PackedMatrix;

// Measured on an Intel core with two float32 FMAs a cycle, 504 rows: 14 rows 159 to 164 GFLOP/s of 167, 8 rows 160, pairs
// widened anew for each block of rows 150.
constexpr int kWidenedRows = 14;
constexpr int kWidenedInputs = 288;                   // 36 KB of a pair
constexpr size_t kWidenedCacheBytes = 5 << 18;        // of activations, in a second cache of 2 MB
constexpr size_t kWidenedPanel = (size_t)kWidenedInputs * kPanelOutputs;  // floats
constexpr size_t kPairOutputs = 2 * kPanelOutputs;

// Sums of MR rows and NP panels over `inputs`; they start at zero or (kContinue) from `partial`, and end in `out`.
struct WidenedSums {
    const float* partial;  // rows are kPairOutputs apart
    float* out;
    size_t out_stride;
    bool add;  // to what is in `out`
};

template <int NP, bool kContinue>
struct WidenedTile {
    using Function = void (*)(const float*, const float*, int, const WidenedSums&);
    template <int MR>
    static void run(const float* a, const float* w, int inputs, const WidenedSums& sums) {
        F acc[MR][NP];
        for (int m = 0; m < MR; ++m)
            for (int p = 0; p < NP; ++p) {
                acc[m][p] = kContinue ? vload(sums.partial + m * kPairOutputs + p * kPanelOutputs) : vzero();
                __builtin_prefetch(sums.out + m * sums.out_stride + p * kPanelOutputs, 1, 3);
            }
        const float* again = a;
        asm("" : "+r"(again));  // or the compiler would load once what it reads twice
#pragma GCC unroll 2
        for (int k = 0; k < inputs; ++k) {
            const float* x = a + k * MR;
            __builtin_prefetch((const uint8_t*)x + kCachedAhead, 0, 3);
            F row[NP];
            for (int p = 0; p < NP; ++p) row[p] = vload(w + p * kWidenedPanel + (size_t)k * kPanelOutputs);
            multiply(acc, row, x, again + k * MR);
        }
        for (int m = 0; m < MR; ++m)
            for (int p = 0; p < NP; ++p) {
                float* to = sums.out + m * sums.out_stride + p * kPanelOutputs;
                vstore(to, sums.add ? vadd(vload(to), acc[m][p]) : acc[m][p]);
            }
    }
    // Every other row's activation is loaded once for both panels, the others' are read by the products themselves:
    // 2.8 instructions a cycle instead of 3.4, of 3 that a core starts while a neighbour runs on its other thread, and
    // 1.6 loads of 2.
    template <int MR>
    static inline __attribute__((always_inline)) void multiply(F (&acc)[MR][NP], const F (&w)[NP], const float* x,
                                                                const float* again) {
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
            if (m % 2 == 0) {
                const F factor = vset1(x[m]);
                for (int p = 0; p < NP; ++p) acc[m][p] = vfma(w[p], factor, acc[m][p]);
            } else {
                for (int p = 0; p < NP; ++p) acc[m][p] = vfma(w[p], vset1((p ? again : x)[m]), acc[m][p]);
            }
        }
    }
    template <int MR>
    static constexpr Function function() {
        return &run<MR>;
    }
};

// Fetches the next pair's bytes into the second cache, an equal share before each of this pair's tiles.
struct AheadOfTiles {
    const uint8_t* at;
    const uint8_t* end;
    size_t share;
    AheadOfTiles(const PackedMatrix& w, int panel, int last_panel, int tiles)
        : at(w.panel(panel < last_panel ? panel : last_panel)),
          end(w.panel(panel + 2 < last_panel ? panel + 2 : last_panel)),
          share(((size_t)(end - at) / (size_t)tiles + kRowBytes) / kRowBytes * kRowBytes) {}
    void fetch_some() {
        for (size_t byte = 0; byte < share && at < end; byte += kRowBytes, at += kRowBytes) __builtin_prefetch(at, 0, 2);
    }
};

// Source::widen(w, panel, first_input, inputs, to): inputs of a panel as floats [inputs][16].
template <class Source>
struct WidenedLinear {
    template <int NP, bool kContinue>
    static constexpr auto kTiles = by_rows<WidenedTile<NP, kContinue>>(std::make_index_sequence<kWidenedRows>());

    // A part of a pair, and the sums of all rows so far.
    static size_t scratch_bytes(int rows) { return (2 * kWidenedPanel + (size_t)rows * kPairOutputs) * sizeof(float); }

    static void multiply(const float* packed, int rows, const PackedMatrix& w, int first_panel, int last_panel,
                         float* out, size_t out_stride, bool add, float* scratch) {
        const int block = RowBlocks(rows, kWidenedRows).size;
        const int cached = (int)(kWidenedCacheBytes / ((size_t)w.k_padded * sizeof(float))) / block * block;
        const int group = cached > block ? cached : block;
        for (int first = 0; first < rows; first += group) {
            const int count = first + group <= rows ? group : rows - first;
            for (int p = first_panel; p < last_panel; p += 2)
                multiply_pair(packed + (size_t)first * w.k_padded, count, block, w, p, last_panel,
                              out + first * out_stride + (size_t)(p - first_panel) * kPanelOutputs, out_stride, add, scratch);
        }
    }

  private:
    static void multiply_pair(const float* packed, int rows, int block, const PackedMatrix& w, int panel, int last_panel,
                              float* out, size_t out_stride, bool add, float* scratch) {
        const int panels = panel + 1 < last_panel ? 2 : 1;
        float* partial = scratch + 2 * kWidenedPanel;
        AheadOfTiles ahead(w, panel + panels, last_panel, (rows + block - 1) / block * ((w.k_padded - 1) / kWidenedInputs + 1));
        for (int k = 0; k < w.k_padded; k += kWidenedInputs) {
            const int inputs = k + kWidenedInputs <= w.k_padded ? kWidenedInputs : w.k_padded - k;
            const bool starts = k == 0, ends = k + inputs == w.k_padded;
            for (int i = 0; i < panels; ++i) Source::widen(w, panel + i, k, inputs, scratch + i * kWidenedPanel);
            const auto* tiles = panels == 2 ? (starts ? kTiles<2, false>.entry : kTiles<2, true>.entry)
                                            : (starts ? kTiles<1, false>.entry : kTiles<1, true>.entry);
            for (int row = 0; row < rows; row += block) {
                const int mr = row + block <= rows ? block : rows - row;
                float* so_far = partial + row * kPairOutputs;
                ahead.fetch_some();
                tiles[mr](packed + (size_t)row * w.k_padded + (size_t)k * mr, scratch, inputs,
                                ends ? WidenedSums{so_far, out + row * out_stride, out_stride, add}
                                     : WidenedSums{so_far, so_far, kPairOutputs, false});
            }
        }
    }
};

// A panel of BF16.
inline void widen_pairs(const uint8_t* from, int rows, float* to) {
    for (int row = 0; row < rows; ++row, from += kRowBytes, to += 2 * kPanelOutputs) {
        const I pairs = iload(from);
        vstore(to, vwiden_low(pairs));
        vstore(to + kPanelOutputs, vwiden_high(pairs));
    }
}

struct WidenPlain {
    static void widen(const PackedMatrix& w, int panel, int first_input, int inputs, float* to) {
        widen_pairs(w.panel(panel) + (size_t)first_input / 2 * kRowBytes, inputs / 2, to);
    }
};

}  // namespace
