// Attention of few rows (decode steps, short drafts) over bfloat16 KV on AVX512-BF16, without arranged copies of the tile.
//
// With few rows for each KV head, bringing a tile of 128 keys into panels costs more than the products. Here 16 keys at a
// time are turned in the first cache and multiplied at once; values are interleaved in registers. Per tile:
//
//   for each panel of 16 keys, for each KV head:  scores = Q K^T
//   for each KV head:                             P = 2^(scores - maximum), O = O * correction + P V
//
// Each sum is the same chain of additions as with arranged tiles (kernels/attention.h): a row's result does not depend on
// which of the two computes it. O is kept in the order in which values interleave until the end. How a task goes through
// its tiles: kernels/few_rows_path.h.
#pragma once
#include "kernels/attention_layout.h"
#include "kernels/tile.h"

namespace {

// scores[MR][kTileKeys]: of 16 keys. q: [step][MR].
struct FewRowsScores {
    using Function = void (*)(const DotBf16::Activation*, const uint8_t* const*, int, float*);
    template <int MR>
    static void run(const DotBf16::Activation* q, const uint8_t* const* keys, int steps, float* scores) {
        alignas(64) uint32_t turned[16][16];
        F acc[MR][1];
        for (int m = 0; m < MR; ++m) acc[m][0] = vzero();
        for (int first = 0; first < steps; first += 16) {
            transpose_16x16(keys, first, turned[0]);
#pragma GCC unroll 16
            for (int step = 0; step < 16; ++step)
                multiply_step<DotBf16, MR, 1>(acc, {iload(turned[step])}, q + (first + step) * DotBf16::kParts * MR, MR, 1);
        }
        for (int m = 0; m < MR; ++m) vstore(scores + m * kTileKeys, acc[m][0]);
    }
    template <int MR>
    static constexpr Function function() {
        return &run<MR>;
    }
};

// out[MR][head_dim] += p V, 32 dims at a time. p: [MR][kTileKeys / kInputs], by pairs of keys or by keys.
struct FewRowsWeighted {
    using Function = void (*)(const DotBf16::Activation*, const uint8_t* const*, int, int, float*);
    template <int MR>
    static void run(const DotBf16::Activation* p, const uint8_t* const* values, int head_dim, int num_keys, float* out) {
        for (int dim = 0; dim < head_dim; dim += 32, out += 32) {
            F acc[MR][2];
            for (int m = 0; m < MR; ++m)
                for (int half = 0; half < 2; ++half) acc[m][half] = vload(out + m * head_dim + 16 * half);
#ifdef TANDEM_BF16_BY_FMA
            for (int key = 0; key < num_keys; ++key) {
                const I value = iload(values[key] + 2 * dim);
                const F low = vwiden_low(value), high = vwiden_high(value);
                for (int m = 0; m < MR; ++m) {
                    const F weight = vset1(p[m * kTileKeys + key]);
                    acc[m][0] = vfma(low, weight, acc[m][0]);
                    acc[m][1] = vfma(high, weight, acc[m][1]);
                }
            }
#else
            for (int pair = 0; pair < num_keys / 2; ++pair) {
                const I even = iload(values[2 * pair] + 2 * dim), odd = iload(values[2 * pair + 1] + 2 * dim);
                const I low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
                for (int m = 0; m < MR; ++m) {
                    const uint32_t weight = p[m * (kTileKeys / 2) + pair];
                    acc[m][0] = DotBf16::accumulate(acc[m][0], low, weight);
                    acc[m][1] = DotBf16::accumulate(acc[m][1], high, weight);
                }
            }
#endif
            for (int m = 0; m < MR; ++m)
                for (int half = 0; half < 2; ++half) vstore(out + m * head_dim + 16 * half, acc[m][half]);
        }
    }
    template <int MR>
    static constexpr Function function() {
        return &run<MR>;
    }
};

constexpr auto kFewRowsScores = by_rows<FewRowsScores>(std::make_index_sequence<kFewRows>());
constexpr auto kFewRowsWeighted = by_rows<FewRowsWeighted>(std::make_index_sequence<kFewRows>());

// Brings rows of O from the order of interleaved values into that of their dims: 4 dims of `low`, 4 of `high`, in turns;
// of widened values one and one.
inline void restore_dims(float* out, size_t size) {
#ifdef TANDEM_BF16_BY_FMA
    const I first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#else
    const I first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
#endif
    const I second = iadd(first, iset1(8));
    for (size_t i = 0; i < size; i += 32) {
        const F low = vload(out + i), high = vload(out + i + 16);
        vstore(out + i, _mm512_permutex2var_ps(low, first, high));
        vstore(out + i + 16, _mm512_permutex2var_ps(low, second, high));
    }
}

struct FewRowsPairs {
    using Activation = DotBf16::Activation;
    static void score(const Activation* q, int rows, const uint8_t* const* keys, int head_dim, float* scores) {
        kFewRowsScores.entry[rows](q, keys, head_dim / 2, scores);
    }
    static void weigh(const Activation* p, int rows, const uint8_t* const* values, int head_dim, int num_keys, float* out) {
        kFewRowsWeighted.entry[rows](p, values, head_dim, num_keys, out);
    }
    static void finish(float* out, size_t size) { restore_dims(out, size); }
};

}  // namespace
