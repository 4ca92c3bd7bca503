// Products of bfloat16 weights in half precision (half_arithmetic.h), weights plain or in 12 bits (compressed_panel.h).
//
// Few rows: a group of four rows of a panel becomes float16 in registers each time it is used, in 16 instructions (of 12
// bits in 13), beside 4 * MR products. Many rows: a pair of panels becomes float16 once, a part of its inputs at a time,
// each input's weights of both panels side by side, and stays in the first cache while all rows are multiplied with it: by
// products that take an activation for all lanes from memory, where a pair of them would need an instruction to get it.
#pragma once
#include "kernels/compressed_linear.h"
#include "kernels/half_arithmetic.h"

#include <type_traits>

namespace {

constexpr int kHalfPartInputs = 320;  // 20 KB of a pair
constexpr size_t kHalfPartBytes = (size_t)kHalfPartInputs * kRowBytes;
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
    const auto multiply = [&](int chain, H(&acc)[1][MR]) __attribute__((always_inline)) {
        start_chain(acc);
        for (int group = chain * kChainGroups; group < (chain + 1) * kChainGroups; ++group, a += kGroupRows * MR) {
            I rows[kGroupRows];
            weights.decode(group, rows);
            for (size_t line = 0; line < Groups::kBytes; line += kRowBytes)
                prefetch_stream<MR>(weights.data + group * Groups::kBytes + line);
#pragma GCC unroll 4
            for (int row = 0; row < kGroupRows; ++row)
#pragma GCC unroll 16
                for (int m = 0; m < MR; ++m) acc[0][m] = hfma(hbits(rows[row]), hpair(a[row * MR + m]), acc[0][m]);
        }
    };
    const auto add_chunk = [&](int chain, auto is_first) __attribute__((always_inline)) {
        H acc[1][MR];
        sum_chunk(chain, chains, multiply, acc);
        end_chunk_of_rows<MR, is_first.value>(acc[0], sums);
        keep_in_memory();
    };
    add_chunk(0, std::true_type());
    for (int chain = kChunkChains; chain < chains; chain += kChunkChains) add_chunk(chain, std::false_type());
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

// A float16 times all lanes, plus c. GCC 12 would make an instruction of its own of the broadcast.
inline __attribute__((always_inline)) H hfma_all(H a, const uint16_t* factor, H c) {
    asm("vfmadd231ph %2%{1to32%}, %1, %0" : "+v"(c) : "v"(a), "m"(*factor));
    return c;
}

// MR rows times a part of a pair, `w` [input][32 outputs]; `sums` [row][32 outputs].
template <bool kStart>
struct HalfCachedTile {
    using Function = void (*)(const uint32_t*, const uint8_t*, int, float*);
    enum { kEven, kOdd };

    template <int MR>
    static void run(const uint32_t* a, const uint8_t* w, int chains, float* sums) {
        constexpr int kPairs = kChainSteps * MR;
        constexpr size_t kWeights = kChainInputs * kRowBytes;
        alignas(64) uint8_t first[2 * MR * sizeof(H)];
        for (int chain = 0; chain < chains; chain += kChunkChains, a += kChunkChains * kPairs, w += kChunkChains * kWeights) {
            const bool starts = kStart && chain == 0;
            if (chain + 1 == chains) {
                (starts ? &end_chunk<MR, false, true> : &end_chunk<MR, false, false>)(a, w, first, sums);
            } else {
                put_chain<MR>(a, w, first);
                (starts ? &end_chunk<MR, true, true> : &end_chunk<MR, true, false>)(a + kPairs, w + kWeights, first, sums);
            }
        }
    }
    // The sums of one chain, in memory: beside those of the second there are not enough registers. Functions of their own,
    // because the compiler does not find registers for the sums of two loops in one.
    template <int MR>
    static __attribute__((noinline)) void put_chain(const uint32_t* a, const uint8_t* w, uint8_t* to) {
        H acc[2][MR];
        add_chain(acc, a, w);
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m)
            for (int part = kEven; part <= kOdd; ++part, to += sizeof(H)) _mm512_store_ph(to, acc[part][m]);
    }
    // Adds the last chain of a chunk, and with kBoth the one before, whose sums are `first`.
    template <int MR, bool kBoth, bool kFirst>
    static __attribute__((noinline)) void end_chunk(const uint32_t* a, const uint8_t* w, const uint8_t* first, float* sums) {
        H acc[2][MR];
        add_chain(acc, a, w);
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m, sums += kPairFloats) {
            if constexpr (kBoth)
                for (int part = kEven; part <= kOdd; ++part, first += sizeof(H))
                    acc[part][m] = _mm512_add_ph(acc[part][m], _mm512_load_ph(first));
            add_halves<kFirst>(_mm512_castph_si512(_mm512_add_ph(acc[kEven][m], acc[kOdd][m])), sums);
        }
    }
    template <int MR>
    static inline __attribute__((always_inline)) void add_chain(H (&acc)[2][MR], const uint32_t* a, const uint8_t* w) {
        start_chain(acc);
        for (int step = 0; step < kChainSteps; step += 2, a += 2 * MR, w += 4 * kRowBytes) {
            add_step(acc, a, w);
            add_step(acc, a + MR, w + 2 * kRowBytes);
        }
    }
    template <int MR>
    static inline __attribute__((always_inline)) void add_step(H (&acc)[2][MR], const uint32_t* a, const uint8_t* w) {
        __builtin_prefetch((const uint8_t*)a + kCachedAhead, 0, 3);
        const H even = hbits(iload(w)), odd = hbits(iload(w + kRowBytes));
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
            const uint16_t* pair = (const uint16_t*)(a + m);
            acc[kEven][m] = hfma_all(even, pair, acc[kEven][m]);
            acc[kOdd][m] = hfma_all(odd, pair + 1, acc[kOdd][m]);
        }
    }
    template <int MR>
    static constexpr Function function() {
        return &run<MR>;
    }
};

template <bool kStart>
constexpr auto kHalfCachedTiles = by_rows<HalfCachedTile<kStart>>(std::make_index_sequence<kHalfCachedRows>());

// Panels that are no more are zeros.
struct NoGroups {
    inline __attribute__((always_inline)) void decode(int, I (&rows)[kGroupRows]) {
        for (I& row : rows) row = izero();
    }
};

// Inputs of two panels as [input][32 outputs].
template <class First, class Second>
inline void write_pair(First first, Second second, int groups, uint8_t* to) {
    alignas(64) uint16_t even[2 * kPanelOutputs];
    for (int i = 0; i < kPanelOutputs; ++i) even[i] = (uint16_t)(2 * i), even[kPanelOutputs + i] = (uint16_t)(2 * i + 32);
    const I evens = iload(even), odds = _mm512_add_epi16(evens, _mm512_set1_epi16(1));
    for (int group = 0; group < groups; ++group) {
        I a[kGroupRows], b[kGroupRows];
        first.decode(group, a);
        second.decode(group, b);
        for (int row = 0; row < kGroupRows; ++row, to += 2 * kRowBytes) {
            istore(to, _mm512_permutex2var_epi16(a[row], evens, b[row]));
            istore(to + kRowBytes, _mm512_permutex2var_epi16(a[row], odds, b[row]));
        }
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
        return rows > kMostHalfStreamedRows ? kHalfPartBytes + (size_t)rows * kPairFloats * sizeof(float) : 0;
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
        float* sums = (float*)(scratch + kHalfPartBytes);
        AheadOfTiles ahead(w, panel + panels, last_panel, (rows + block - 1) / block * ((w.k_padded - 1) / kHalfPartInputs + 1));
        for (int k = 0; k < w.k_padded; k += kHalfPartInputs) {
            const int inputs = k + kHalfPartInputs <= w.k_padded ? kHalfPartInputs : w.k_padded - k;
            const bool last = k + inputs == w.k_padded;
            write_part(w, panel, panels, k, inputs, scratch);
            const auto* tiles = k == 0 ? kHalfCachedTiles<true>.entry : kHalfCachedTiles<false>.entry;
            for (int row = 0; row < rows; row += block) {
                const int mr = row + block <= rows ? block : rows - row;
                float *of_block = sums + row * kPairFloats, *to = out.data + row * out.stride;
                ahead.fetch_some();
                if (last)  // or the sums would wait for the lines that they go to
                    for (int m = 0; m < mr; ++m)
                        for (int i = 0; i < panels; ++i) __builtin_prefetch(to + m * out.stride + i * kPanelOutputs, 1, 3);
                tiles[mr](a.block(first + row) + (size_t)k / 2 * mr, scratch, inputs / kChainInputs, of_block);
                if (!last) continue;
                for (int m = 0; m < mr; ++m)
                    for (int i = 0; i < panels; ++i)
                        finish_sum(vload(of_block + m * kPairFloats + i * kPanelOutputs), a.exponents[first + row + m],
                                   w.half[panel + i].exponent, to + m * out.stride + i * kPanelOutputs, out.add);
            }
        }
    }

    static void write_part(const PackedMatrix& w, int panel, int panels, int first_input, int inputs, uint8_t* to) {
        const int first = first_input / kGroupInputs, groups = inputs / kGroupInputs;
        with_groups(w, panel, first, [&](auto groups_of_first) {
            if (panels == 1) return write_pair(groups_of_first, NoGroups(), groups, to);
            with_groups(w, panel + 1, first,
                        [&](auto groups_of_second) { write_pair(groups_of_first, groups_of_second, groups, to); });
        });
    }

    template <class Function>
    static void with_groups(const PackedMatrix& w, int panel, int first, Function&& function) {
        if (const uint8_t* plain = Kept::plain(w, panel))
            function(PlainGroups(plain, w.half[panel], first));
        else
            function(typename Kept::Groups(w.panel(panel), w.half[panel], first));
    }
};

template <class Kept>
constexpr LinearKernels kHalfLinear = {&HalfActivations::bytes, &half_run_rows, &pack_half, &HalfLinear<Kept>::scratch_bytes,
                                       &HalfLinear<Kept>::multiply};

}  // namespace
