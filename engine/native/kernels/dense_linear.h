// Products with F32 and BF16 weights. Activations are packed in blocks of rows as [step][row], so that the loop walks
// one pointer; a step is one input (F32) or a pair of bfloat16 inputs (BF16; one input where bfloat16 is widened).
#pragma once
#include "kernel_table.h"
#include "kernels/tile.h"
#ifdef TANDEM_BF16_BY_FMA
#include "kernels/widened_linear.h"
#endif

namespace {

using tandem::LinearKernels;
using tandem::PackedMatrix;

// How rows are cut into blocks.
template <class Dot>
struct LinearShape {
    // Up to here rows pass over a panel in blocks while the next panels are fetched; more rows take panels in pairs from
    // the cache. Measured on Zen 4, products of 18 to 48 rows per second: 1.1 to 1.3 times those of pairs; of 400 rows
    // 0.96 times.
    static constexpr int kMostStreamedRows = kRegisters == 32 ? 64 : kStreamRows;
    // Rows of a pair's block: with 8, the next block's products start while this one's sums are written. Measured on
    // Zen 4 with 512 rows: 93 to 96 % of the core's rate, with 12 and nothing fetched 88 to 93 %.
    static constexpr int kPairedRows = kRegisters == 32 ? 8 : kPairRows;
};

#ifdef TANDEM_BF16_BY_FMA
template <>
struct LinearShape<DotWidened> {
    static constexpr int kMostStreamedRows = 32;
    static constexpr int kPairedRows = kWidenedRows;
};
#endif

template <class Dot>
inline RowBlocks linear_blocks(int rows) {
    using Shape = LinearShape<Dot>;
    return RowBlocks(rows, rows <= Shape::kMostStreamedRows ? kStreamRows : Shape::kPairedRows);
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
    static constexpr auto kPairTiles =
        by_rows<Maker<2, Fetch::kCached>>(std::make_index_sequence<LinearShape<Dot>::kPairedRows>());
    static constexpr int kMostStreamedRows = LinearShape<Dot>::kMostStreamedRows;

    static size_t packed_bytes(int rows, int k_padded) {
        return (size_t)rows * activations_of<Dot>(k_padded) * sizeof(Activation);
    }
    static size_t scratch_bytes([[maybe_unused]] int rows, int) {
#ifdef TANDEM_BF16_BY_FMA
        if constexpr (Dot::kParts == 2) return rows > kMostStreamedRows ? WidenedLinear<WidenPlain>::scratch_bytes(rows) : 0;
#endif
        return 0;
    }

    static void multiply(const void* packed, int rows, const PackedMatrix& w, int first_panel, int last_panel,
                         float* out, size_t out_stride, bool add, [[maybe_unused]] void* scratch) {
#ifdef TANDEM_BF16_BY_FMA
        if constexpr (Dot::kParts == 2)
            if (rows > kMostStreamedRows)
                return WidenedLinear<WidenPlain>::multiply((const float*)packed, rows, w, first_panel, last_panel, out,
                                                           out_stride, add, (float*)scratch);
#endif
        const int steps = w.k_padded / Dot::kInputs;
        const RowBlocks blocks = linear_blocks<Dot>(rows);
        const bool pairs = rows > kMostStreamedRows;
        for (int p = first_panel; p < last_panel;) {
            const int width = pairs && p + 1 < last_panel ? 2 : 1;
            for (int row = 0; row < rows; row += blocks.size) {
                const int mr = row + blocks.size <= rows ? blocks.size : rows - row;
                const Activation* a = (const Activation*)packed + (size_t)row * activations_of<Dot>(w.k_padded);
                float* to = out + row * out_stride + (size_t)(p - first_panel) * kPanelOutputs;
                const Tile tile = width == 2 ? kPairTiles.entry[mr] : kStreamTiles.entry[mr];
                tile(a, w.panel(p), w.panel_bytes, steps, to, out_stride, add);
            }
            p += width;
        }
    }
};

constexpr int kLineSteps = (int)(kRowBytes / 4);  // steps of a row in one cache line

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
// round(row, x, real, out): 32 inputs of a row from x on, `real` of them there, as 16 steps.
template <class Round>
inline void pack_lines(const float* x, size_t stride, RowBlocks blocks, int rows, int k, int k_padded, uint32_t* to,
                       const Round& round) {
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
                    round(row + m, x + (row + m) * stride + first, real,
                          mr == 1 ? to + line * kLineSteps : rounded[8 * line + m]);
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

inline void pack_rows(const float* x, size_t stride, RowBlocks blocks, int rows, int k, int k_padded, uint32_t* to) {
    pack_lines(x, stride, blocks, rows, k, k_padded, to,
               [](int, const float* line, int real, uint32_t* out) { round_line(line, real, out); });
}

// 16 floats of a row, `real` of them there, rounded to bfloat16 if kRounded.
template <bool kRounded>
inline void float_line(const float* x, int real, float* out) {
    float rest[kLineSteps] = {};
    if (real < kLineSteps) {
        for (int i = 0; i < real; ++i) rest[i] = x[i];
        x = rest;
    }
    for (int i = 0; i < kLineSteps; i += kWidth) {
        F values = vload(x + i);
#ifdef TANDEM_BF16_BY_FMA
        if constexpr (kRounded) values = vround_to_bf16(values);
#endif
        vstore(out + i, values);
    }
}

// The same for floats: lines of 16 inputs of up to 16 rows are turned and written together.
template <bool kRounded>
inline void pack_floats(const float* x, size_t stride, RowBlocks blocks, int rows, int k, int k_padded, float* to) {
    alignas(64) float lines[16][kLineSteps] = {};
    alignas(64) uint32_t turned[kLineSteps][16];
    const uint8_t* from[16];
    for (int m = 0; m < 16; ++m) from[m] = (const uint8_t*)lines[m];
    for (int row = 0; row < rows; row += blocks.size) {
        const int mr = row + blocks.size <= rows ? blocks.size : rows - row;
        for (int first = 0; first < k_padded; first += kLineSteps, to += kLineSteps * mr) {
            const int left = k > first ? k - first : 0, real = left < kLineSteps ? left : kLineSteps;
            for (int m = 0; m < mr; ++m) {
                const float* line = x + (row + m) * stride + first;
                if (!kRounded && real == kLineSteps) {
                    from[m] = (const uint8_t*)line;
                    continue;
                }
                from[m] = (const uint8_t*)lines[m];
                float_line<kRounded>(line, real, mr == 1 ? to : lines[m]);
            }
            if (mr == 1) {
                if (!kRounded && real == kLineSteps) __builtin_memcpy(to, from[0], kRowBytes);
                continue;
            }
            transpose_16x16(from, 0, turned[0]);
            for (int s = 0; s < kLineSteps; ++s) copy_words((uint32_t*)to + s * mr, turned[s], mr);
        }
    }
}

inline void pack_rows(const float* x, size_t stride, RowBlocks blocks, int rows, int k, int k_padded, float* to) {
    pack_floats<false>(x, stride, blocks, rows, k, k_padded, to);
}

template <class Dot>
inline int dense_run_rows(int rows) {
    return linear_blocks<Dot>(rows).size;
}

template <class Dot>
inline void pack_dense(const float* x, size_t stride, int first, int last, int rows, int k, int k_padded, void* packed) {
    const RowBlocks blocks = linear_blocks<Dot>(rows);
    typename Dot::Activation* to = (typename Dot::Activation*)packed + (size_t)first * activations_of<Dot>(k_padded);
    if constexpr (Dot::kParts == 2)
        pack_floats<true>(x, stride, blocks, last - first, k, k_padded, to);
    else
        pack_rows(x, stride, blocks, last - first, k, k_padded, to);
}

template <class Dot>
constexpr LinearKernels kDenseLinear = {&Dense<Dot>::packed_bytes, &dense_run_rows<Dot>, &pack_dense<Dot>,
                                        &Dense<Dot>::scratch_bytes, &Dense<Dot>::multiply};
constexpr LinearKernels kF32Linear = kDenseLinear<DotF32>;
constexpr LinearKernels kBf16Linear = kDenseLinear<DotBf16>;

}  // namespace
