// Products with Q4_0, Q4_1 and Q8_0 weights: activations are rounded to int8 with one scale for each 32 inputs, sums of
// bytes are exact integers, and after each block of 32 the integer joins a float32 sum:
//   sum += d_w * d_x * (dot(q_w, q_x) - offset * sum(q_x)) + m_w * d_x * sum(q_x)
#pragma once
#include "kernels/dense_linear.h"
#include "kernels/elementwise.h"

namespace {

using tandem::kBlockInputs;
using tandem::kHalfRowBytes;

constexpr int kBlockWords = kBlockInputs / 4;            // 32-bit words of one row's 32 activations
constexpr int kPackedBlockWords = kBlockWords + 2;       // then its scale (float) and its correction
// Rows of one pass over a panel: as many as keep both their sums in registers. Up to 16 rows pass at once, so that reading
// and multiplying go on together: 0.97 of the time of two passes of 8, where 64 rows take 1.1 times as long with 16 as with 10.
constexpr int kQuantizedRows = kRegisters == 32 ? 10 : 2;
constexpr int kMostQuantizedRows = kRegisters == 32 ? 16 : kQuantizedRows;

inline RowBlocks quantized_blocks(int rows) {
    return RowBlocks(rows, rows <= kMostQuantizedRows ? kMostQuantizedRows : kQuantizedRows);
}

// What a pass over a panel fetches: `step` bytes for each block of 32 inputs. On Intel cores into the second cache: the
// first one's few buffers for lines on their way would make the loop wait (one row takes 0.9 of the time so, 8 rows 0.97).
struct Ahead {
    const uint8_t* at;
    size_t step;
};

inline void fetch_ahead(Ahead& ahead) {
#ifdef TANDEM_BF16_BY_FMA
    constexpr int kCloseness = 2;
#else
    constexpr int kCloseness = 3;
#endif
    for (size_t line = 0; line < ahead.step; line += kRowBytes) __builtin_prefetch(ahead.at + line, 0, kCloseness);
    ahead.at += ahead.step;
}

// Rounds 32 values to [-127, 127]; returns the scale, and the sum of the bytes.
inline float quantize_block(const float* x, int8_t* out, int32_t* sum) {
    F highest = vzero();
    for (int i = 0; i < kBlockInputs; i += kWidth) highest = vmax(highest, vabs(vload(x + i)));
    const float maximum = vmaximum(highest);
    const F inverse = vset1(maximum > 0.0f ? 127.0f / maximum : 0.0f);
    I sums = izero();
    for (int i = 0; i < kBlockInputs; i += kWidth) {
        const I rounded = ifrom_float(vmul(vload(x + i), inverse));
        sums = iadd(sums, rounded);
        istore_int8(out + i, rounded);
    }
    *sum = (int32_t)vsum(vfrom_int(sums));  // exact
    return maximum / 127.0f;
}

template <class Format>
struct Quantized {
    using Tile = void (*)(const uint32_t*, const uint8_t*, int, float*, size_t, bool, Ahead);

    struct Maker {
        template <int MR>
        static constexpr Tile function() {
            return &Format::template multiply<MR>;
        }
    };
    static constexpr auto kTiles = by_rows<Maker>(std::make_index_sequence<kMostQuantizedRows>());

    // The only pass over a panel fetches a little ahead of itself; of several each fetches its part of the next panel, so
    // that memory is never idle.
    static Ahead ahead_of(const PackedMatrix& w, int panel, int pass, int passes) {
        constexpr size_t kDistance = 4096, kLines = (Format::kBytes + kRowBytes - 1) / kRowBytes;
        if (passes == 1) return {w.panel(panel) + kDistance, Format::kBytes};
        const size_t step = (kLines + passes - 1) / passes * kRowBytes, first = step * pass;
        return {w.panel(panel + 1) + first * (w.k_padded / kBlockInputs), first < Format::kBytes ? step : 0};
    }

    static void multiply(const void* packed, int rows, const PackedMatrix& w, int first_panel, int last_panel,
                         float* out, size_t out_stride, bool add, void*) {
        const int blocks_k = w.k_padded / kBlockInputs;
        const size_t row_words = Format::row_words(w.k_padded);
        const RowBlocks blocks = quantized_blocks(rows);
        for (int p = first_panel; p < last_panel; ++p)
            for (int pass = 0; pass < blocks.count; ++pass) {
                const int row = pass * blocks.size, mr = row + blocks.size <= rows ? blocks.size : rows - row;
                kTiles.entry[mr]((const uint32_t*)packed + row * row_words, w.panel(p), blocks_k,
                                 out + row * out_stride + (size_t)(p - first_panel) * kPanelOutputs, out_stride, add,
                                 ahead_of(w, p, pass, blocks.count));
            }
    }
    static size_t packed_bytes(int rows, int k_padded) { return (size_t)rows * Format::row_words(k_padded) * 4; }
};

template <int MR>
inline void store_sums(const F (&sum)[MR][kVectors], float* out, size_t out_stride, bool add) {
    for (int m = 0; m < MR; ++m)
        for (int v = 0; v < kVectors; ++v) {
            float* to = out + m * out_stride + v * kWidth;
            vstore(to, add ? vadd(vload(to), sum[m][v]) : sum[m][v]);
        }
}

// kBits 4 or 8; kOffset is subtracted from every weight; kMinimum: blocks have minima.
template <int kBits, int kOffset, bool kMinimum>
struct BlockFormat {
    static constexpr int kRows = kBits == 4 ? 4 : 8;
    static constexpr size_t kBytes = kRows * kRowBytes + (kMinimum ? 2 : 1) * kHalfRowBytes;

    static size_t row_words(int k_padded) { return (size_t)(k_padded / kBlockInputs) * kPackedBlockWords; }

    // a: for each block of 32 inputs [8 words][MR], scales [MR], corrections [MR].
    template <int MR>
    static void multiply(const uint32_t* a, const uint8_t* w, int blocks, float* out, size_t out_stride, bool add,
                         Ahead ahead) {
        F sum[MR][kVectors];
        for (int m = 0; m < MR; ++m)
            for (int v = 0; v < kVectors; ++v) sum[m][v] = vzero();
        for (int b = 0; b < blocks; ++b, w += kBytes, a += kPackedBlockWords * MR) {
            fetch_ahead(ahead);
            const float* scales = (const float*)(a + kBlockWords * MR);
            const uint32_t* corrections = a + (kBlockWords + 1) * MR;
            for (int v = 0; v < kVectors; ++v) {
                const uint8_t* lane = w + v * kWidth * 4;
                I dot[MR];
                for (int m = 0; m < MR; ++m) dot[m] = kOffset ? iset1((int32_t)corrections[m]) : izero();
                for (int r = 0; r < kRows; ++r) add_row<MR>(dot, iload(lane + r * kRowBytes), a, r);
                const uint16_t* half = (const uint16_t*)(w + kRows * kRowBytes) + v * kWidth;
                const F d = vload_f16(half);
                for (int m = 0; m < MR; ++m)
                    sum[m][v] = vfma(vmul(d, vset1(scales[m])), vfrom_int(dot[m]), sum[m][v]);
                if constexpr (kMinimum) {
                    const F low = vload_f16(half + kPanelOutputs);
                    for (int m = 0; m < MR; ++m) sum[m][v] = vfma(low, vset1(((const float*)corrections)[m]), sum[m][v]);
                }
            }
        }
        store_sums<MR>(sum, out, out_stride, add);
    }

    template <int MR>
    static inline void add_row(I (&dot)[MR], I row, const uint32_t* a, int r) {
        if constexpr (kBits == 4) {
            const I low = iand(row, iset1(0x0f0f0f0f));
            const I high = iand(ishift_right<4>(row), iset1(0x0f0f0f0f));
            for (int m = 0; m < MR; ++m) {
                dot[m] = dot_bytes(dot[m], low, iset1((int32_t)a[2 * r * MR + m]));
                dot[m] = dot_bytes(dot[m], high, iset1((int32_t)a[(2 * r + 1) * MR + m]));
            }
        } else {
            for (int m = 0; m < MR; ++m) dot[m] = dot_bytes(dot[m], row, iset1((int32_t)a[r * MR + m]));
        }
    }

    // What a block of activations adds whatever the weights are: the scaled sum of its bytes (a float), to be multiplied by
    // the minima, or the integer that makes up for weights stored kOffset too high.
    static uint32_t correction(float scale, int32_t sum) {
        const float scaled = scale * (float)sum;
        const int32_t offset = -kOffset * sum;
        uint32_t bits;
        __builtin_memcpy(&bits, kMinimum ? (const void*)&scaled : (const void*)&offset, 4);
        return bits;
    }

    static int run_rows(int rows) { return quantized_blocks(rows).size; }
    // k is k_padded: formats of blocks take nothing else.
    static void pack(const float* x, size_t stride, int first_row, int last_row, int rows, int, int k_padded, void* packed) {
        uint32_t* to = (uint32_t*)packed + first_row * row_words(k_padded);
        const int size = run_rows(rows), count = last_row - first_row;
        for (int row = 0; row < count; row += size) {
            const int mr = row + size <= count ? size : count - row;
            for (int first = 0; first < k_padded; first += kBlockInputs, to += (size_t)kPackedBlockWords * mr)
                for (int m = 0; m < mr; ++m) {
                    uint32_t words[kBlockWords];
                    int32_t sum;
                    const float scale = quantize_block(x + (row + m) * stride + first, (int8_t*)words, &sum);
                    for (int i = 0; i < kBlockWords; ++i) to[i * mr + m] = words[i];
                    const uint32_t added = correction(scale, sum);
                    __builtin_memcpy(to + kBlockWords * mr + m, &scale, 4);
                    __builtin_memcpy(to + (kBlockWords + 1) * mr + m, &added, 4);
                }
        }
    }
};

template <class Format>
constexpr LinearKernels kQuantizedLinear = {&Quantized<Format>::packed_bytes, &Format::run_rows, &Format::pack, &no_scratch,
                                            &Quantized<Format>::multiply};

using Q4_0Format = BlockFormat<4, 8, false>;
using Q4_1Format = BlockFormat<4, 0, true>;
using Q8_0Format = BlockFormat<8, 128, false>;

}  // namespace
