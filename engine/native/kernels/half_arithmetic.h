// Products of bfloat16 weights in half precision, for cores that multiply 32 float16 values as fast as 16 floats: how
// numbers are brought there, and in which order sums are made. Every kernel of these products follows it, so a row's
// result does not depend on the rows beside it, on the kernel, or on whether weights are kept in 12 bits.
//
//   weight      exactly, times a power of two for each panel (half_panel.h)
//   activation  rounded to float16, times a power of two for each row that brings its largest one to [0.5, 1)
//   chain       of 32 inputs: for each output the even and the odd ones make 16 FMAs in float16 each
//   chunk       of two chains, the last one of a row perhaps of one: chains, then even and odd inputs are added in float16,
//               which cannot overflow
//   sum         of chunks in order, in float32; then the powers of two are undone
//
// A vector of float16 sums holds those of one row and one panel: 16 pairs of an even and an odd one, as a row of a panel
// holds pairs of weights. Two rows become floats together: `kPairFloats` floats, in pairs of both rows.
#pragma once
#include "half_panel.h"
#include "kernels/dense_linear.h"

namespace {

using tandem::HalfPanel;
using H = __m512h;

// Why so short: docs/decisions.md.
constexpr int kChainInputs = 32;
constexpr int kChainSteps = kChainInputs / 2;
constexpr int kChunkChains = 2;  // sum_chunk and HalfCachedTile know
constexpr int kPairFloats = 2 * kPanelOutputs;

inline H hzero() { return _mm512_setzero_ph(); }
inline H hbits(I a) { return _mm512_castsi512_ph(a); }
inline H hpair(uint32_t x) { return hbits(iset1((int32_t)x)); }
inline H hfma(H a, H b, H c) { return _mm512_fmadd_ph(a, b, c); }

// bfloat16 to float16, `bias` as in each lane of HalfPanel::bias << 7.
inline __attribute__((always_inline)) I half_of_bf16(I weights, I bias) {
    const I magnitude = iand(weights, _mm512_set1_epi16(0x7fff));
    const I shifted = _mm512_slli_epi16(_mm512_subs_epu16(magnitude, bias), 3);
    return _mm512_ternarylogic_epi32(shifted, weights, _mm512_set1_epi16((int16_t)0x8000), 0xd8);  // the last chooses
}

inline I half_bias(const HalfPanel& half) { return _mm512_set1_epi16((int16_t)(half.bias << 7)); }

// Adds 32 float16 to 32 floats; kFirst: puts them there.
template <bool kFirst>
inline __attribute__((always_inline)) void add_halves(I halves, float* sums) {
    F low = _mm512_cvtxph_ps(_mm256_castsi256_ph(_mm512_castsi512_si256(halves)));
    F high = _mm512_cvtxph_ps(_mm256_castsi256_ph(_mm512_extracti64x4_epi64(halves, 1)));
    if (!kFirst) low = vadd(vload(sums), low), high = vadd(vload(sums + kWidth), high);
    vstore(sums, low);
    vstore(sums + kWidth, high);
}

// Adds a chunk's sums of two rows to `sums`; of one row, that row twice.
template <bool kFirst>
inline __attribute__((always_inline)) void end_chunk(H row0, H row1, float* sums) {
    const I x0 = _mm512_castph_si512(row0), x1 = _mm512_castph_si512(row1);
    // row 0 in the lower halves, row 1 in the upper ones: even + odd of row 1, odd + even of row 0
    const H crossed = hbits(_mm512_shldi_epi32(x1, x0, 16)), straight = hbits(_mm512_mask_blend_epi16(0xaaaaaaaa, x0, x1));
    add_halves<kFirst>(_mm512_castph_si512(_mm512_add_ph(crossed, straight)), sums);
}

template <int MR, bool kFirst>
inline __attribute__((always_inline)) void end_chunk_of_rows(const H (&acc)[MR], float* sums) {
#pragma GCC unroll 8
    for (int m = 0; m < MR; m += 2) end_chunk<kFirst>(acc[m], acc[m + 1 < MR ? m + 1 : m], sums + m / 2 * kPairFloats);
}

// Or the compiler would keep in registers what is stored, and for want of them move the loop's own sums to memory.
inline __attribute__((always_inline)) void keep_in_memory() { asm volatile("" ::: "memory"); }

template <int MR, int NP>
inline __attribute__((always_inline)) void start_chain(H (&acc)[NP][MR]) {
#pragma GCC unroll 2
    for (int p = 0; p < NP; ++p)
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
            acc[p][m] = hzero();
            asm("" : "+v"(acc[p][m]));  // in a register of its own, not in one zero for all or in memory
        }
}

// acc: of the chunk that begins with `chain`. multiply(chain, acc) makes the sums of one chain; those of the first wait in
// memory, because beside the second's there are not enough registers. Every loop over sums is unrolled, or the compiler
// would move all of them through memory.
template <int MR, int NP, class Chain>
inline __attribute__((always_inline)) void sum_chunk(int chain, int chains, Chain&& multiply, H (&acc)[NP][MR]) {
    multiply(chain, acc);
    if (chain + 1 == chains) return;
    alignas(64) uint8_t waiting[NP][MR][sizeof(H)];
#pragma GCC unroll 2
    for (int p = 0; p < NP; ++p)
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) _mm512_store_ph(waiting[p][m], acc[p][m]);
    keep_in_memory();
    multiply(chain + 1, acc);
#pragma GCC unroll 2
    for (int p = 0; p < NP; ++p)
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) acc[p][m] = _mm512_add_ph(acc[p][m], _mm512_load_ph(waiting[p][m]));
}

struct HalfOut {
    float* data;
    size_t stride;
    bool add;  // to what is there
};

inline __attribute__((always_inline)) void finish_sum(F sum, float row_exponent, float panel_exponent, float* to, bool add) {
    sum = vscale(sum, vset1(row_exponent + panel_exponent));
    vstore(to, add ? vadd(vload(to), sum) : sum);
}

// Writes the sums of `rows` rows and one panel. row_exponents: what undoes each row's power of two.
inline void finish_sums(const float* sums, const float* row_exponents, int rows, float panel_exponent, const HalfOut& out) {
    const I even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const I odd = iadd(even, iset1(1));
    for (int m = 0; m < rows; ++m) {
        const float* pair = sums + m / 2 * kPairFloats;
        const F row = _mm512_permutex2var_ps(vload(pair), m % 2 ? odd : even, vload(pair + kWidth));
        finish_sum(row, row_exponents[m], panel_exponent, out.data + m * out.stride, out.add);
    }
}

// How rows are cut into blocks: up to kMostHalfStreamedRows pass over a panel while it streams by, more take panels from
// the cache. Blocks have even numbers of rows, but for the last one.
constexpr int kMostHalfStreamedRows = 32;
constexpr int kHalfCachedRows = 12;

inline RowBlocks half_blocks(int rows) {
    if (rows <= kStreamRows) return RowBlocks::of_size(rows, rows);
    const RowBlocks even(rows, rows <= kMostHalfStreamedRows ? kStreamRows : kHalfCachedRows);
    return RowBlocks::of_size(rows, (even.size + 1) / 2 * 2);
}

// Packed activations: what undoes the scale of each row, floats; then blocks of rows as pairs of float16 [pair][row].
struct HalfActivations {
    static size_t head_floats(int rows) { return ((size_t)rows + kWidth - 1) / kWidth * kWidth; }
    static size_t bytes(int rows, int k_padded) { return head_floats(rows) * 4 + (size_t)rows * (size_t)k_padded * 2; }

    const float* exponents;
    const uint32_t* pairs;
    size_t row_pairs;
    HalfActivations(const void* packed, int rows, int k_padded)
        : exponents((const float*)packed),
          pairs((const uint32_t*)packed + head_floats(rows)),
          row_pairs((size_t)k_padded / 2) {}
    const uint32_t* block(int first_row) const { return pairs + (size_t)first_row * row_pairs; }
};

// The exponent that brings the largest finite magnitude to [0.5, 1).
inline float half_exponent(const float* x, int k) {
    constexpr int32_t kInfinity = 0x7f800000;
    I largest = izero();
    const I magnitude = iset1(0x7fffffff);
    for (int i = 0; i < k; i += kWidth) {
        const __mmask16 real = k - i >= kWidth ? (__mmask16)0xffff : (__mmask16)((1u << (k - i)) - 1);
        const I bits = iand(_mm512_maskz_loadu_epi32(real, x + i), magnitude);
        largest = _mm512_mask_max_epi32(largest, _mm512_cmplt_epi32_mask(bits, iset1(kInfinity)), largest, bits);
    }
    return (float)(126 - (_mm512_reduce_max_epi32(largest) >> 23));
}

struct HalfRounding {
    const float* exponents;  // of the rows, as HalfActivations has them
    void operator()(int row, const float* x, int real, uint32_t* out) const {
        const F exponent = vset1(-exponents[row]);
        for (int i = 0; i < 2 * kLineSteps; i += kWidth) {
            const int left = real - i;
            const __mmask16 there =
                left >= kWidth ? (__mmask16)0xffff : (left > 0 ? (__mmask16)((1u << left) - 1) : (__mmask16)0);
            const F scaled = vscale(_mm512_maskz_loadu_ps(there, x + i), exponent);
            _mm256_storeu_si256((__m256i*)((uint16_t*)out + i), _mm256_castph_si256(_mm512_cvtxps_ph(scaled)));
        }
    }
};

inline int half_run_rows(int rows) { return half_blocks(rows).size; }

inline void pack_half(const float* x, size_t stride, int first, int last, int rows, int k, int k_padded, void* packed) {
    float* exponents = (float*)packed + first;
    const int count = last - first;
    for (int row = 0; row < count; ++row) exponents[row] = -half_exponent(x + row * stride, k);
    uint32_t* pairs = (uint32_t*)packed + HalfActivations::head_floats(rows) + (size_t)first * (size_t)(k_padded / 2);
    pack_lines(x, stride, half_blocks(rows), count, k, k_padded, pairs, HalfRounding{exponents});
}

}  // namespace
