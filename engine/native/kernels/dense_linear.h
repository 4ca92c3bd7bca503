// Products with F32 and BF16 weights. Activations are packed in blocks of rows as [step][row], so that the loop walks
// one pointer; a step is one input (F32) or a pair of bfloat16 inputs (BF16).
#pragma once
#include "kernel_table.h"
#include "kernels/tile.h"

namespace {

using tandem::LinearKernels;
using tandem::PackedMatrix;

// Up to here rows pass over a panel in blocks while the next panels are fetched; more rows take panels in pairs from the
// cache. Measured on Zen 4, products of 18 to 48 rows per second: 1.1 to 1.3 times those of pairs; of 400 rows 0.96 times.
constexpr int kMostStreamedRows = kRegisters == 32 ? 64 : kStreamRows;
// Rows of a pair's block: with 8, the next block's products start while this one's sums are written. Measured on Zen 4
// with 512 rows: 93 to 96 % of the core's rate, with 12 and nothing fetched 88 to 93 %.
constexpr int kLinearPairRows = kRegisters == 32 ? 8 : kPairRows;
inline RowBlocks linear_blocks(int rows) {
    return RowBlocks(rows, rows <= kMostStreamedRows ? kStreamRows : kLinearPairRows);
}

inline size_t no_scratch(int, int) { return 0; }

template <class Dot>
struct Dense {
    using Activation = typename Dot::Activation;
    using Tile = void (*)(const Activation*, const uint8_t*, size_t, int, float*, size_t, bool);

    template <int NP, Fetch kFetch>
    struct Maker {
        template <int MR>
        static void run(const Activation* a, const uint8_t* w, size_t panel_stride, int steps, float* out,
                        size_t out_stride, bool add) {
            multiply_tile<Dot, MR, NP, kFetch, false>(a, MR, 1, w, panel_stride, steps, out, out_stride, add);
        }
        template <int MR>
        static constexpr Tile function() {
            return &run<MR>;
        }
    };

    static constexpr auto kStreamTiles = by_rows<Maker<1, Fetch::kStream>>(std::make_index_sequence<kStreamRows>());
    static constexpr auto kPairTiles = by_rows<Maker<2, Fetch::kCached>>(std::make_index_sequence<kLinearPairRows>());

    static size_t packed_bytes(int rows, int k_padded) {
        return (size_t)rows * (size_t)(k_padded / Dot::kInputs) * sizeof(Activation);
    }

    static void multiply(const void* packed, int rows, const PackedMatrix& w, int first_panel, int last_panel,
                         float* out, size_t out_stride, bool add, void*) {
        const int steps = w.k_padded / Dot::kInputs;
        const RowBlocks blocks = linear_blocks(rows);
        const bool pairs = rows > kMostStreamedRows;
        for (int p = first_panel; p < last_panel;) {
            const int width = pairs && p + 1 < last_panel ? 2 : 1;
            for (int row = 0; row < rows; row += blocks.size) {
                const int mr = row + blocks.size <= rows ? blocks.size : rows - row;
                const Activation* a = (const Activation*)packed + (size_t)row * steps;
                float* to = out + row * out_stride + (size_t)(p - first_panel) * kPanelOutputs;
                const Tile tile = width == 2 ? kPairTiles.entry[mr] : kStreamTiles.entry[mr];
                tile(a, w.panel(p), w.panel_bytes, steps, to, out_stride, add);
            }
            p += width;
        }
    }
};

constexpr int kLineSteps = (int)(kRowBytes / 4);  // steps of a row in one cache line

// x [rows, k] to blocks of [step][row]. Zeros stand for inputs from k to k_padded.
inline void pack_rows(const float* x, size_t stride, RowBlocks blocks, int rows, int k, int k_padded, float* to) {
    for (int row = 0; row < rows; row += blocks.size) {
        const int mr = row + blocks.size <= rows ? blocks.size : rows - row;
        for (int m = 0; m < mr; ++m)
            for (int i = 0; i < k_padded; ++i) to[(size_t)i * mr + m] = i < k ? x[(row + m) * stride + i] : 0.0f;
        to += (size_t)mr * k_padded;
    }
}

// One row as bfloat16, zeros after k.
inline void round_row(const float* x, int k, int k_padded, uint16_t* out) {
    int i = 0;
    for (; i + kWidth <= k; i += kWidth) vstore_bf16(out + i, vload(x + i));
    if (i < k) {
        float rest[kWidth] = {};
        for (int j = 0; j < kWidth && i + j < k; ++j) rest[j] = x[i + j];
        vstore_bf16(out + i, vload(rest));
        i += kWidth;
    }
    for (; i < k_padded; ++i) out[i] = 0;
}

// 32 inputs of a row, `real` of them there.
inline void round_line(const float* x, int real, uint32_t* out) {
    if (real == 2 * kLineSteps)
        for (int i = 0; i < 2 * kLineSteps; i += kWidth) vstore_bf16((uint16_t*)out + i, vload(x + i));
    else
        round_row(x, real, 2 * kLineSteps, (uint16_t*)out);
}

// Lines of 16 steps of up to 16 rows are rounded, turned and written together: of up to 8 rows two lines each.
inline void pack_rows(const float* x, size_t stride, RowBlocks blocks, int rows, int k, int k_padded, uint32_t* to) {
    alignas(64) uint32_t rounded[16][kLineSteps] = {}, turned[kLineSteps + 1][16];  // copies read up to 16 words
    const uint8_t* from[16];
    for (int m = 0; m < 16; ++m) from[m] = (const uint8_t*)rounded[m];
    for (int row = 0; row < rows; row += blocks.size) {
        const int mr = row + blocks.size <= rows ? blocks.size : rows - row, most_lines = mr <= 8 ? 2 : 1;
        for (int first = 0; first < k_padded;) {
            const int left = (k_padded - first) / (2 * kLineSteps), lines = left < most_lines ? left : most_lines;
            for (int line = 0; line < lines; ++line, first += 2 * kLineSteps) {
                const int real = k - first < 2 * kLineSteps ? (k > first ? k - first : 0) : 2 * kLineSteps;
                for (int m = 0; m < mr; ++m)
                    round_line(x + (row + m) * stride + first, real, mr == 1 ? to + line * kLineSteps : rounded[8 * line + m]);
            }
            if (mr > 1) {
                transpose_16x16(from, 0, turned[0]);
                for (int line = 0; line < lines; ++line)
                    for (int s = 0; s < kLineSteps; ++s)
                        copy_words(to + (line * kLineSteps + s) * mr, turned[s] + 8 * line, mr);
            }
            to += lines * kLineSteps * mr;
        }
    }
}

template <class Dot>
inline void pack_dense(const float* x, size_t stride, int rows, int k, int k_padded, void* packed) {
    pack_rows(x, stride, linear_blocks(rows), rows, k, k_padded, (typename Dot::Activation*)packed);
}

constexpr LinearKernels kF32Linear = {&Dense<DotF32>::packed_bytes, &pack_dense<DotF32>, &no_scratch, &Dense<DotF32>::multiply};
constexpr LinearKernels kBf16Linear = {&Dense<DotBf16>::packed_bytes, &pack_dense<DotBf16>, &no_scratch, &Dense<DotBf16>::multiply};

}  // namespace
