// The two products of attention by float32 FMAs, and how keys and values lie for them: widened, a step's inputs of 64 keys
// or of all dims side by side.
//
//   for 64 keys, for each tile of 6 rows:  scores = Q K^T
//   for 64 dims, for each tile of 6 rows:  O += P V
//
// Each sum is one chain of additions, of scores in order of the dims, of O in order of the keys.
#pragma once
#include "kernels/attention_layout.h"
#include "kernels/dense_linear.h"

namespace {

// 6 rows by 4 panels: 10 loads for 24 FMAs where 12 rows by 2 panels take 14, and as many instructions as those of 14 rows
// by 2 that read every other row's activation twice. With 7 rows the registers do not suffice.
constexpr int kFloatRows = 6;
constexpr int kFloatPanels = 4;
constexpr int kWideKeys = kFloatPanels * kPanelOutputs;
// Tiles that read 64 keys from the first cache before the next ones come from the second. Measured: one 0.96 times as
// fast, 3 and 12 the same.
constexpr int kTilesOfBlock = 6;

// Sums of MR rows and NP panels, side by side in a step of `w`. kQueries: x[step][MR], else x[MR][kTileKeys].
template <int NP, bool kQueries>
struct FloatTile {
    using Function = void (*)(const float*, const float*, size_t, int, float*, size_t);

    template <int MR>
    static void run(const float* x, const float* w, size_t w_step, int steps, float* out, size_t out_stride) {
        F acc[MR][NP];
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
            for (int p = 0; p < NP; ++p) acc[m][p] = kQueries ? vzero() : vload(out + m * out_stride + p * kPanelOutputs);
        constexpr int kStep = kQueries ? MR : 1;
        const float* end = w + (size_t)steps * w_step;
        do {
            add_step(acc, w, x);
            add_step(acc, w + w_step, x + kStep);
            w += 2 * w_step, x += 2 * kStep;
        } while (w != end);
        asm("" : "+r"(out));  // or the addresses would be kept in registers meanwhile
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
            for (int p = 0; p < NP; ++p) vstore(out + m * out_stride + p * kPanelOutputs, acc[m][p]);
    }
    template <int MR>
    static inline __attribute__((always_inline)) void add_step(F (&acc)[MR][NP], const float* w, const float* x) {
        F row[NP];
#pragma GCC unroll 4
        for (int p = 0; p < NP; ++p) row[p] = vload(w + p * kPanelOutputs);
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
            const F factor = vset1(x[m * (kQueries ? 1 : kTileKeys)]);
#pragma GCC unroll 4
            for (int p = 0; p < NP; ++p) acc[m][p] = vfma(row[p], factor, acc[m][p]);
        }
    }
    template <int MR>
    static constexpr Function function() {
        return &run<MR>;
    }
};

template <bool kQueries>
inline void multiply_float_tile(int rows, int outputs, const float* x, const float* w, size_t w_step, int steps, float* out,
                                size_t out_stride) {
    static constexpr auto kWide = by_rows<FloatTile<kFloatPanels, kQueries>>(std::make_index_sequence<kFloatRows>());
    static constexpr auto kNarrow = by_rows<FloatTile<2, kQueries>>(std::make_index_sequence<kFloatRows>());
    (outputs == kWideKeys ? kWide.entry : kNarrow.entry)[rows](x, w, w_step, steps, out, out_stride);
}

// kBf16: of the pool's keys and values.
template <bool kBf16>
struct FloatProducts {
    using Activation = float;
    struct Session {};
    static Session session(int) { return {}; }
    static constexpr int kInputs = 1;
    static constexpr int kBlockRows = kFloatRows * kTilesOfBlock;

    static RowBlocks blocks(int rows) { return RowBlocks::of_size(rows, kBlockRows); }
    static int state_rows(int rows) { return rows; }
    static int summed_rows(int rows) { return rows; }
    static void pack_queries(const float* x, int rows, int head_dim, float* q) {
        const bool few = kBf16 && rows <= kFewRows;
        pack_rows(x, (size_t)head_dim, RowBlocks::of_size(rows, few ? kFewRows : kFloatRows), rows, head_dim, head_dim, q);
    }

    static void scores(const float* q, int rows, const uint8_t* keys, int head_dim, int num_keys, float* out) {
        for (int key = 0; key < num_keys; key += kWideKeys) {
            const int outputs = num_keys - key < kWideKeys ? 32 : kWideKeys;
            for (int row = 0; row < rows; row += kFloatRows)
                multiply_float_tile<true>(rows_of_tile(rows, row), outputs, q + (size_t)row * head_dim,
                                          (const float*)keys + (size_t)key * head_dim, kWideKeys, head_dim,
                                          out + row * kTileKeys + key, kTileKeys);
        }
    }
    static void weigh(const float* p, int rows, const uint8_t* values, int head_dim, int num_keys, float* out) {
        for (int dim = 0; dim < head_dim; dim += kWideKeys) {
            const int outputs = head_dim - dim < kWideKeys ? 32 : kWideKeys;
            for (int row = 0; row < rows; row += kFloatRows)
                multiply_float_tile<false>(rows_of_tile(rows, row), outputs, p + row * kTileKeys, (const float*)values + dim,
                                           (size_t)head_dim, num_keys, out + (size_t)row * head_dim + dim, (size_t)head_dim);
        }
    }

  private:
    static int rows_of_tile(int rows, int row) { return rows - row < kFloatRows ? rows - row : kFloatRows; }
};

template <bool kBf16>
struct Traits<FloatProducts<kBf16>> {
    static constexpr bool kScalesQueries = true;
    static constexpr bool kBf16Values = kBf16;
    static constexpr float kValueScale = 1.0f;
    static void store_weights(float* p, int key, const F (&weights)[2]) {
        vstore(p + key, weights[0]);
        vstore(p + key + kWidth, weights[1]);
    }
    static F raise(F maximum, F of_tile) { return vmax(maximum, of_tile); }
    static void restore_dims(float*, int) {}
};

template <bool kBf16>
struct Arrangement<FloatProducts<kBf16>> {
    static constexpr bool kWidens = false;  // not before

    // [64 keys][dims][64]
    static void keys(const uint8_t* const* rows, int head_dim, int key, uint8_t* tile) {
        constexpr int kDims = kBf16 ? 2 : 1;  // in a word
        alignas(64) uint32_t turned[16][16];
        float* to = (float*)tile + (size_t)(key / kWideKeys * kWideKeys) * head_dim + key % kWideKeys;
        for (int word = 0; word < head_dim / kDims; word += 16) {
            transpose_16x16(rows, word, turned[0]);
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i, to += kDims * kWideKeys) {
                const I words = iload(turned[i]);
                vstore(to, kBf16 ? vwiden_low(words) : vbits(words));
                if constexpr (kBf16) vstore(to + kWideKeys, vwiden_high(words));
            }
        }
    }
    // [key][dims]
    static void values(const uint8_t* const* rows, int head_dim, int key, uint8_t* tile) {
        float* to = (float*)tile + (size_t)key * head_dim;
        for (int i = 0; i < kPanelOutputs; ++i, to += head_dim)
            for (int dim = 0; dim < head_dim; dim += kWidth)
                vstore(to + dim, kBf16 ? vload_bf16((const uint16_t*)rows[i] + dim) : vload((const float*)rows[i] + dim));
    }
};

}  // namespace
