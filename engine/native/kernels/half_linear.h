// Products of bfloat16 weights in half precision (half_arithmetic.h), weights plain or in 12 bits (compressed_panel.h).
//
// Few rows: a group of four rows of a panel becomes float16 in registers each time it is used, in 16 instructions (of 12
// bits in 13), beside 4 * MR products. Many rows: a pair of panels becomes float16 once, a part of its inputs at a time,
// and stays in the first cache while all rows are multiplied with it.
#pragma once
#include "kernels/compressed_linear.h"
#include "kernels/half_arithmetic.h"

namespace {

constexpr int kHalfPartInputs = 576;  // 36 KB of a pair
constexpr size_t kHalfPanel = (size_t)kHalfPartInputs / 2 * kRowBytes;
static_assert(kHalfPartInputs % (kChunkChains * kChainInputs) == 0, "a part ends where a chunk does");
constexpr int kChainGroups = kChainInputs / kGroupInputs;
constexpr size_t kHalfCachedBytes = 5 << 18;  // of activations, in a second cache of 2 MB

// Groups of a panel of BF16 as float16.
struct PlainGroups {
    static constexpr size_t kBytes = kPlainGroupBytes;
    const uint8_t* data;
    I bias;
    PlainGroups(const uint8_t* plain, const HalfPanel& half, int first) : data(plain + first * kBytes), bias(half_bias(half)) {}
    inline __attribute__((always_inline)) void decode(int group, I (&rows)[kGroupRows]) {
        for (int row = 0; row < kGroupRows; ++row)
            rows[row] = half_of_bf16(iload(data + group * kBytes + row * kRowBytes), bias);
    }
};

// Groups of a panel of BF16_COMPRESSED as float16, in order from the first on.
struct CompressedGroups {
    static constexpr size_t kBytes = kGroupBytes;
    const CompressedHeader& header;
    const HalfPanel& half;
    const uint8_t* data;
    const HighByteException *exception, *end;
    int skipped, next;  // groups before the first one; the next exception's group, counted from the first one
    I table;
    CompressedGroups(const uint8_t* panel, const HalfPanel& of_half, int first)
        : header(*(const CompressedHeader*)panel),
          half(of_half),
          data(panel + sizeof(CompressedHeader) + first * kBytes),
          exception(header.exceptions),
          end(exception + header.num_exceptions),
          skipped(first),
          table(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)half.table))) {
        while (exception < end && exception->group < first) ++exception;
        find_next();
    }
    void find_next() { next = exception < end ? exception->group - skipped : -1; }
    inline __attribute__((always_inline)) void decode(int group, I (&rows)[kGroupRows]) {
        if (__builtin_expect(group == next, 0)) return decode_with_exceptions(group, rows);
        decode_group(data + group * kBytes, table, rows);
        for (int row = 0; row < kGroupRows; ++row) rows[row] = _mm512_slli_epi16(rows[row], 3);
    }
    __attribute__((noinline)) void decode_with_exceptions(int group, I (&rows)[kGroupRows]) {
        alignas(64) uint8_t plain[kPlainGroupBytes];
        exception = decode_exceptional(data - skipped * kBytes, group + skipped, load_table(header), plain, exception, end);
        find_next();
        PlainGroups(plain, half, 0).decode(0, rows);
    }
};

template <int MR, class Groups>
inline void multiply_half_stream(const uint32_t* a, const float* row_exponents, Groups weights, int chains,
                                 float panel_exponent, const HalfOut& out) {
    alignas(64) float sums[(MR + 1) / 2 * kPairFloats];
    H chunk[MR];
    for (int chain = 0; chain < chains; ++chain) {
        H acc[MR];
        for (int m = 0; m < MR; ++m) acc[m] = hzero();
        for (int group = chain * kChainGroups; group < (chain + 1) * kChainGroups; ++group, a += kGroupRows * MR) {
            I rows[kGroupRows];
            weights.decode(group, rows);
            for (size_t line = 0; line < Groups::kBytes; line += kRowBytes)
                prefetch_stream<MR>(weights.data + group * Groups::kBytes + line);
#pragma GCC unroll 4
            for (int row = 0; row < kGroupRows; ++row)
#pragma GCC unroll 16
                for (int m = 0; m < MR; ++m) acc[m] = hfma(hbits(rows[row]), hpair(a[row * MR + m]), acc[m]);
        }
        if (!end_chain<MR>(acc, chain, chains, chunk)) continue;
        if (chain < kChunkChains)
            end_chunk_of_rows<MR, true>(acc, sums);
        else
            end_chunk_of_rows<MR, false>(acc, sums);
    }
    finish_sums(sums, row_exponents, MR, panel_exponent, out);
}

template <class Groups>
struct HalfStreamTile {
    using Function = void (*)(const uint32_t*, const float*, const uint8_t*, const HalfPanel&, int, const HalfOut&);
    template <int MR>
    static void run(const uint32_t* a, const float* row_exponents, const uint8_t* panel, const HalfPanel& half, int chains,
                    const HalfOut& out) {
        multiply_half_stream<MR>(a, row_exponents, Groups(panel, half, 0), chains, half.exponent, out);
    }
    template <int MR>
    static constexpr Function function() {
        return &run<MR>;
    }
};

// MR rows times NP panels that lie kHalfPanel apart as float16; `sums` are [panel][pair of rows][kPairFloats].
template <int NP, bool kStart>
struct HalfCachedTile {
    using Function = void (*)(const uint32_t*, const uint8_t*, int, float*);
    template <int MR>
    static void run(const uint32_t* a, const uint8_t* w, int chains, float* sums) {
        H chunk[NP][MR];
        for (int chain = 0; chain < chains; ++chain) {
            H acc[NP][MR];
            for (int p = 0; p < NP; ++p)
                for (int m = 0; m < MR; ++m) acc[p][m] = hzero();
#pragma GCC unroll 2
            for (int step = chain * kChainSteps; step < (chain + 1) * kChainSteps; ++step) {
                const uint32_t* x = a + step * MR;
                __builtin_prefetch((const uint8_t*)x + kCachedAhead, 0, 3);
                H row[NP];
                for (int p = 0; p < NP; ++p) row[p] = hbits(iload(w + p * kHalfPanel + step * kRowBytes));
#pragma GCC unroll 16
                for (int m = 0; m < MR; ++m) {
                    const H factor = hpair(x[m]);
                    for (int p = 0; p < NP; ++p) acc[p][m] = hfma(row[p], factor, acc[p][m]);
                }
            }
            for (int p = 0; p < NP; ++p) {
                float* to = sums + p * ((MR + 1) / 2) * kPairFloats;
                if (!end_chain<MR>(acc[p], chain, chains, chunk[p])) continue;
                if (kStart && chain < kChunkChains)
                    end_chunk_of_rows<MR, true>(acc[p], to);
                else
                    end_chunk_of_rows<MR, false>(acc[p], to);
            }
        }
    }
    template <int MR>
    static constexpr Function function() {
        return &run<MR>;
    }
};

template <int NP, bool kStart>
constexpr auto kHalfCachedTiles = by_rows<HalfCachedTile<NP, kStart>>(std::make_index_sequence<kHalfCachedRows>());

template <class Groups>
inline void write_half(Groups weights, int groups, uint8_t* to) {
    for (int group = 0; group < groups; ++group, to += kPlainGroupBytes) {
        I rows[kGroupRows];
        weights.decode(group, rows);
        for (int row = 0; row < kGroupRows; ++row) istore(to + row * kRowBytes, rows[row]);
    }
}

// What the kernels ask of each way of keeping weights.
struct HalfPlain {
    static const uint8_t* plain(const PackedMatrix& w, int panel) { return w.panel(panel); }
    using Groups = PlainGroups;
};
struct HalfCompressed {
    static const uint8_t* plain(const PackedMatrix& w, int panel) { return ((const CompressedHeader*)w.panel(panel))->plain; }
    using Groups = CompressedGroups;
};

template <class Kept>
struct HalfLinear {
    static constexpr auto kPlainTiles = by_rows<HalfStreamTile<PlainGroups>>(std::make_index_sequence<kStreamRows>());
    static constexpr auto kTiles = by_rows<HalfStreamTile<typename Kept::Groups>>(std::make_index_sequence<kStreamRows>());

    // A part of a pair, and the sums of all rows so far.
    static size_t scratch_bytes(int rows, int) {
        return rows > kMostHalfStreamedRows ? 2 * kHalfPanel + ((size_t)rows + 1) * kPairFloats * sizeof(float) : 0;
    }

    static void multiply(const void* packed, int rows, const PackedMatrix& w, int first_panel, int last_panel, float* out,
                         size_t out_stride, bool add, void* scratch) {
        const HalfActivations a(packed, rows, w.k_padded);
        const RowBlocks blocks = half_blocks(rows);
        if (rows > kMostHalfStreamedRows)
            return multiply_cached(a, rows, blocks.size, w, first_panel, last_panel, {out, out_stride, add}, (uint8_t*)scratch);
        for (int p = first_panel; p < last_panel; ++p, out += kPanelOutputs) {
            const uint8_t* plain = Kept::plain(w, p);
            const auto* tiles = plain ? kPlainTiles.entry : kTiles.entry;
            for (int row = 0; row < rows; row += blocks.size) {
                const int mr = row + blocks.size <= rows ? blocks.size : rows - row;
                tiles[mr](a.block(row), a.exponents + row, plain ? plain : w.panel(p), w.half[p], w.k_padded / kChainInputs,
                          {out + row * out_stride, out_stride, add});
            }
        }
    }

  private:
    static void multiply_cached(const HalfActivations& a, int rows, int block, const PackedMatrix& w, int first_panel,
                                int last_panel, const HalfOut& out, uint8_t* scratch) {
        const int cached = (int)(kHalfCachedBytes / ((size_t)w.k_padded * 2)) / block * block;
        const int group = cached > block ? cached : block;
        for (int first = 0; first < rows; first += group) {
            const int count = first + group <= rows ? group : rows - first;
            for (int p = first_panel; p < last_panel; p += 2)
                multiply_pair(a, first, count, block, w, p, last_panel,
                              {out.data + first * out.stride + (size_t)(p - first_panel) * kPanelOutputs, out.stride, out.add},
                              scratch);
        }
    }

    static void multiply_pair(const HalfActivations& a, int first, int rows, int block, const PackedMatrix& w, int panel,
                              int last_panel, const HalfOut& out, uint8_t* scratch) {
        const int panels = panel + 1 < last_panel ? 2 : 1;
        float* sums = (float*)(scratch + 2 * kHalfPanel);
        AheadOfTiles ahead(w, panel + panels, last_panel, (rows + block - 1) / block * ((w.k_padded - 1) / kHalfPartInputs + 1));
        for (int k = 0; k < w.k_padded; k += kHalfPartInputs) {
            const int inputs = k + kHalfPartInputs <= w.k_padded ? kHalfPartInputs : w.k_padded - k;
            for (int i = 0; i < panels; ++i) write_part(w, panel + i, k, inputs, scratch + i * kHalfPanel);
            const auto* tiles = panels == 2 ? (k == 0 ? kHalfCachedTiles<2, true>.entry : kHalfCachedTiles<2, false>.entry)
                                            : (k == 0 ? kHalfCachedTiles<1, true>.entry : kHalfCachedTiles<1, false>.entry);
            for (int row = 0; row < rows; row += block) {
                const int mr = row + block <= rows ? block : rows - row;
                float* of_block = sums + row * kPairFloats;
                ahead.fetch_some();
                tiles[mr](a.block(first + row) + (size_t)k / 2 * mr, scratch, inputs / kChainInputs, of_block);
                if (k + inputs < w.k_padded) continue;
                for (int i = 0; i < panels; ++i)
                    finish_sums(of_block + i * ((mr + 1) / 2) * kPairFloats, a.exponents + first + row, mr,
                                w.half[panel + i].exponent,
                                {out.data + row * out.stride + (size_t)i * kPanelOutputs, out.stride, out.add});
            }
        }
    }

    static void write_part(const PackedMatrix& w, int panel, int first_input, int inputs, uint8_t* to) {
        const uint8_t* plain = Kept::plain(w, panel);
        const int first = first_input / kGroupInputs, groups = inputs / kGroupInputs;
        if (plain)
            write_half(PlainGroups(plain, w.half[panel], first), groups, to);
        else
            write_half(typename Kept::Groups(w.panel(panel), w.half[panel], first), groups, to);
    }
};

template <class Kept>
constexpr LinearKernels kHalfLinear = {&HalfActivations::bytes, &pack_half, &HalfLinear<Kept>::scratch_bytes,
                                       &HalfLinear<Kept>::multiply};

}  // namespace
