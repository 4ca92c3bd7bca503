// Products with BF16_COMPRESSED weights (compressed_panel.h) on AVX512-BF16: the sums are those of BF16, bit for bit.
//
// Few rows: a group of four rows of BF16 is decoded in registers each time it is used, 7 instructions beside 4 * MR
// products; what is saved are a quarter of the bytes. Many rows: a pair of panels is decoded once into scratch memory.
// Bytes read: 12 bits a weight once, A once per panel or pair of panels.
#pragma once
#include "kernels/compressed_groups.h"
#include "kernels/dense_linear.h"

namespace {

constexpr size_t kGroupActivations = activations_of<DotBf16>(kGroupInputs);  // of one row

template <int MR>
inline __attribute__((always_inline)) void accumulate_group(F (&acc)[MR][1], const I (&rows)[kGroupRows],
                                                            const DotBf16::Activation* a) {
#pragma GCC unroll 4
    for (int row = 0; row < kGroupRows; ++row)
        multiply_step<DotBf16, MR, 1>(acc, {rows[row]}, a + row * DotBf16::kParts * MR, MR, 1);
}

// MR rows of activations times one panel, decoded on the way.
template <int MR>
inline void multiply_compressed(const DotBf16::Activation* a, const uint8_t* panel, int groups, float* out, size_t out_stride,
                                bool add) {
    const CompressedHeader& header = *(const CompressedHeader*)panel;
    const I table = load_table(header);
    const HighByteException *exception = header.exceptions, *end = exception + header.num_exceptions;
    const uint8_t* w = panel + sizeof(CompressedHeader);
    F acc[MR][1];
    for (int m = 0; m < MR; ++m) acc[m][0] = vzero();
    for (int group = 0;; ++group) {
        I rows[kGroupRows];
        const int next = exception < end ? exception->group : groups;
        for (; group < next; ++group) {
            const uint8_t* at = w + group * kGroupBytes;
            decode_group(at, table, rows);
            for (size_t line = 0; line < kGroupBytes; line += kRowBytes) prefetch_stream<MR>(at + line);
            accumulate_group<MR>(acc, rows, a + (size_t)group * kGroupActivations * MR);
        }
        if (group == groups) break;
        alignas(64) uint8_t plain[kPlainGroupBytes];
        exception = decode_exceptional(w, group, table, plain, exception, end);
        for (int row = 0; row < kGroupRows; ++row) rows[row] = iload(plain + row * kRowBytes);
        accumulate_group<MR>(acc, rows, a + (size_t)group * kGroupActivations * MR);
    }
    for (int m = 0; m < MR; ++m) {
        float* to = out + m * out_stride;
        vstore(to, add ? vadd(vload(to), acc[m][0]) : acc[m][0]);
    }
}

#ifdef TANDEM_BF16_BY_FMA
// Inputs of a panel as floats: whole groups.
struct WidenCompressed {
    static void widen(const PackedMatrix& w, int panel, int first_input, int inputs, float* to) {
        const CompressedHeader& header = *(const CompressedHeader*)w.panel(panel);
        const int first = first_input / kGroupInputs, groups = inputs / kGroupInputs;
        if (header.plain) return widen_pairs(header.plain + first * kPlainGroupBytes, groups * kGroupRows, to);
        const I table = load_table(header);
        const uint8_t* from = w.panel(panel) + sizeof(CompressedHeader) + first * kGroupBytes;
        for (int group = 0; group < groups; ++group) {
            I rows[kGroupRows];
            decode_group(from + group * kGroupBytes, table, rows);
            for (int row = 0; row < kGroupRows; ++row) {
                float* inputs_of_row = to + (size_t)(group * kGroupRows + row) * 2 * kPanelOutputs;
                vstore(inputs_of_row, vwiden_low(rows[row]));
                vstore(inputs_of_row + kPanelOutputs, vwiden_high(rows[row]));
            }
        }
        for (int i = 0; i < header.num_exceptions; ++i) {
            const HighByteException& exception = header.exceptions[i];
            const int group = exception.group - first;
            if (group < 0 || group >= groups) continue;
            // The high byte of lane `offset / 4` of a row of pairs is the highest of a float.
            const int row = exception.offset / (int)kRowBytes, lane = exception.offset % (int)kRowBytes / 4;
            float* weight = to + (size_t)(2 * (group * kGroupRows + row) + exception.offset % 4 / 2) * kPanelOutputs + lane;
            ((uint8_t*)weight)[3] = exception.value;
        }
    }
};
#else
// A panel as BF16 again.
inline void expand_panel(const uint8_t* panel, int groups, uint8_t* plain) {
    const CompressedHeader& header = *(const CompressedHeader*)panel;
    if (header.plain) {
        __builtin_memcpy(plain, header.plain, groups * kPlainGroupBytes);
        return;
    }
    decode_groups(panel + sizeof header, groups, load_table(header), plain);
    put_exceptions(header.exceptions, header.exceptions + header.num_exceptions, 0, groups, plain);
}
#endif

struct CompressedTile {
    using Function = void (*)(const DotBf16::Activation*, const uint8_t*, int, float*, size_t, bool);
    template <int MR>
    static constexpr Function function() {
        return &multiply_compressed<MR>;
    }
};

struct Compressed {
    using Plain = Dense<DotBf16>;
    static constexpr auto kTiles = by_rows<CompressedTile>(std::make_index_sequence<kStreamRows>());

#ifdef TANDEM_BF16_BY_FMA
    static size_t scratch_bytes(int rows, int) {
        return rows > Plain::kMostStreamedRows ? WidenedLinear<WidenCompressed>::scratch_bytes(rows) : 0;
    }
#else
    // Two panels of BF16, where many rows share their decoding.
    static size_t scratch_bytes(int rows, int k_padded) {
        return rows > Plain::kMostStreamedRows ? 2 * (size_t)(k_padded / kGroupInputs) * kPlainGroupBytes : 0;
    }
#endif

    static void multiply(const void* packed, int rows, const PackedMatrix& w, int first_panel, int last_panel,
                         float* out, size_t out_stride, bool add, void* scratch) {
        if (rows > Plain::kMostStreamedRows)
            return multiply_expanded(packed, rows, w, first_panel, last_panel, out, out_stride, add, scratch);
        const int groups = w.k_padded / kGroupInputs, steps = w.k_padded / DotBf16::kInputs;
        const RowBlocks blocks = linear_blocks<DotBf16>(rows);
        for (int p = first_panel; p < last_panel; ++p, out += kPanelOutputs) {
            const uint8_t* plain = ((const CompressedHeader*)w.panel(p))->plain;
            for (int row = 0; row < rows; row += blocks.size) {
                const int mr = row + blocks.size <= rows ? blocks.size : rows - row;
                const DotBf16::Activation* a = (const DotBf16::Activation*)packed + (size_t)row * activations_of<DotBf16>(w.k_padded);
                float* to = out + row * out_stride;
                if (plain)
                    Plain::kStreamTiles.entry[mr](a, plain, 0, steps, to, out_stride, add);
                else
                    kTiles.entry[mr](a, w.panel(p), groups, to, out_stride, add);
            }
        }
    }

#ifdef TANDEM_BF16_BY_FMA
    static void multiply_expanded(const void* packed, int rows, const PackedMatrix& w, int first_panel, int last_panel,
                                  float* out, size_t out_stride, bool add, void* scratch) {
        WidenedLinear<WidenCompressed>::multiply((const float*)packed, rows, w, first_panel, last_panel, out, out_stride,
                                                 add, (float*)scratch);
    }
#else
    static void multiply_expanded(const void* packed, int rows, const PackedMatrix& w, int first_panel, int last_panel,
                                  float* out, size_t out_stride, bool add, void* scratch) {
        const int groups = w.k_padded / kGroupInputs;
        PackedMatrix pair = w;
        pair.data = (uint8_t*)scratch;
        pair.panel_bytes = groups * kPlainGroupBytes;
        for (int p = first_panel; p < last_panel; p += 2, out += 2 * kPanelOutputs) {
            const int panels = p + 1 < last_panel ? 2 : 1;
            for (int i = 0; i < panels; ++i) expand_panel(w.panel(p + i), groups, pair.panel(i));
            Plain::multiply(packed, rows, pair, 0, panels, out, out_stride, add, nullptr);
        }
    }
#endif
};

constexpr LinearKernels kCompressedLinear = {&Dense<DotBf16>::packed_bytes, &dense_run_rows<DotBf16>, &pack_dense<DotBf16>,
                                             &Compressed::scratch_bytes, &Compressed::multiply};

}  // namespace
