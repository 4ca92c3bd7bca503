// Scores Q K^T of attention in half precision: queries and keys as float16, sums of 64 dims in float16.
//
//   query  rounded to float16, times a power of two for each row that brings its largest dim to [0.5, 1)
//   key    exactly, times a power of two for each key that brings its largest dim to [2^7, 2^8): from 2^-21 of that on
//   chain  of 32 dims: for each key 16 FMAs in float16 for the even and for the odd ones
//   chunk  of two chains, the last one of a head perhaps of one: chains, then even and odd dims are added in float16; at
//          most 64 products below 2^8, a quarter of what a float16 holds
//   score  chunks in order, in float32, times both powers of two; no number where query or key has a dim that is none
//
// Few rows and arranged tiles make the same sums in the same order: a row's result depends neither on its neighbours nor
// on which of the two computes it.
#pragma once
#include "kernels/attention_layout.h"
#include "kernels/half_sums.h"

namespace {

constexpr int kScoredRows = 12;  // by two panels of keys
constexpr int kChunkSteps = kChunkChains * kChainSteps;
constexpr int32_t kInfiniteFloat = 0x7f800000, kInfiniteBf16 = 0x7f80;
// A float16's bits where a float's begin are that float but for 2^112. This and both powers of two, which may be far
// apart, are undone by two factors.
constexpr float kRowPower = 56.0f, kKeyPower = -56.0f;

inline F power_of_two(F exponent) { return vscale(vset1(1.0f), exponent); }

// Rows of queries in blocks of up to kScoredRows: pairs of float16 [step][row], then a factor for each row's scores. A
// block begins where its rows would as floats.
inline const float* row_factors(const uint32_t* block, int rows, int head_dim) { return (const float*)block + rows * head_dim / 2; }

inline void pack_half_queries(const float* x, int rows, int head_dim, uint32_t* q) {
    for (int first = 0; first < rows; first += kScoredRows) {
        const int count = rows - first < kScoredRows ? rows - first : kScoredRows;
        const float* from = x + (size_t)first * head_dim;
        uint32_t* block = q + (size_t)first * head_dim;
        float* factors = (float*)row_factors(block, count, head_dim);
        float exponents[kScoredRows];
        for (int m = 0; m < count; ++m) {
            I largest = izero();
            for (int i = 0; i < head_dim; i += kWidth)
                largest = _mm512_max_epi32(largest, iand(ibits(vload(from + m * head_dim + i)), iset1(INT32_MAX)));
            const int32_t bits = _mm512_reduce_max_epi32(largest);
            exponents[m] = (float)((bits >> 23) - 126);
            const F factor = bits < kInfiniteFloat ? power_of_two(vset1(exponents[m] + kRowPower)) : vset1(__builtin_nanf(""));
            factors[m] = _mm512_cvtss_f32(factor);
        }
        pack_lines(from, (size_t)head_dim, RowBlocks::of_size(count, count), count, head_dim, head_dim, block,
                   HalfRounding{exponents});
    }
}

// 16 keys turned: bfloat16 pairs [step][16 keys].
struct TurnedKeys {
    alignas(64) uint32_t words[kMaxHeadDim / 2][kPanelOutputs];
    I bias;    // of half_of_bf16
    F factor;  // of each key's scores

    TurnedKeys(const uint8_t* const* rows, int steps) {
        I largest = izero();
        const I magnitude = _mm512_set1_epi16(0x7fff);
        for (int first = 0; first < steps; first += 16) {
            transpose_16x16(rows, first, words[first]);
            for (int step = first; step < first + 16; ++step)
                largest = _mm512_max_epu16(largest, iand(iload(words[step]), magnitude));
        }
        largest = _mm512_max_epu16(largest, _mm512_rol_epi32(largest, 16));  // of the even and the odd dims
        const I top = _mm512_srli_epi16(largest, tandem::kBf16MantissaBits);
        const I lowered = _mm512_subs_epu16(top, _mm512_set1_epi16(tandem::kHalfTopExponent));
        bias = _mm512_slli_epi16(lowered, tandem::kBf16MantissaBits);
        const I low = iset1(0xffff);
        const __mmask16 is_odd = _mm512_cmpge_epi32_mask(iand(largest, low), iset1(kInfiniteBf16));
        const F power = power_of_two(vadd(vfrom_int(iand(lowered, low)), vset1(kKeyPower)));
        factor = _mm512_mask_mov_ps(power, is_odd, vset1(__builtin_nanf("")));
    }
    inline __attribute__((always_inline)) H step(int index) const { return hbits(half_of_bf16(iload(words[index]), bias)); }
};

// Factors of keys' scores, kept behind a tile's float16 keys.
inline float* key_factors(uint8_t* tile, int head_dim) { return (float*)(tile + (size_t)kTileKeys * head_dim * 2); }

// 16 keys' part of a tile: [panel of 16 keys][step][16 keys] pairs of float16
inline void arrange_half_keys(const uint8_t* const* rows, int head_dim, int key, uint8_t* tile) {
    const int steps = head_dim / 2;
    const TurnedKeys keys(rows, steps);
    uint8_t* to = tile + (size_t)key / kPanelOutputs * steps * kRowBytes;
    for (int step = 0; step < steps; ++step) istore(to + step * kRowBytes, _mm512_castph_si512(keys.step(step)));
    vstore(key_factors(tile, head_dim) + key, keys.factor);
}

// A chunk's sum of one row and 16 keys as floats, but for 2^112.
inline __attribute__((always_inline)) F chunk_scores(H sums) {
    const H both = _mm512_add_ph(sums, hbits(_mm512_rol_epi32(_mm512_castph_si512(sums), 16)));
    return vbits(iand(_mm512_srai_epi32(_mm512_castph_si512(both), 3), iset1((int32_t)0x8fffe000)));
}

// kContinues: chunks before this one are in `scores`; kLast: there are none after it.
template <int MR, int NP, bool kContinues, bool kLast, class Keys>
inline __attribute__((always_inline)) void end_chunk_of_scores(const HalfSums<MR, NP>& sums, const float* row_factors,
                                                               const Keys& keys, float* scores) {
    F factor[NP];
#pragma GCC unroll 2
    for (int p = 0; p < NP; ++p) factor[p] = keys.factor(p);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
        for (int p = 0; p < NP; ++p) {
            float* to = scores + m * kTileKeys + p * kPanelOutputs;
            F score = chunk_scores(sums.of[m][p]);
            if (kContinues) score = vadd(vload(to), score);
            if (kLast) score = vmul(vmul(score, vset1(row_factors[m])), factor[p]);
            vstore(to, score);
        }
}

// scores[MR][kTileKeys] of NP panels of keys. keys.load(step, vectors): pairs of float16; keys.factor(panel).
template <int MR, int NP, class Keys>
inline __attribute__((always_inline)) void score_keys(const uint32_t* q, const float* row_factors, int steps, const Keys& keys,
                                                      float* scores) {
    HalfSums<MR, NP> waiting;
    for (int first = 0; first < steps; first += kChainSteps) {
        HalfSums<MR, NP> sums;
        H vectors[NP];
        keys.load(first, vectors);
        sums.template start<1>(vectors, q + first * MR);
#pragma GCC unroll 3
        for (int step = first + 1; step < first + kChainSteps; ++step) {
            keys.load(step, vectors);
            sums.template add<1>(vectors, q + step * MR);
        }
        const int end = first + kChainSteps;
        if (first % kChunkSteps != 0) sums.join(waiting);
        if (end % kChunkSteps != 0 && end != steps) {
            sums.wait_in(waiting);
            continue;
        }
        if (end == steps && end <= kChunkSteps)
            end_chunk_of_scores<MR, NP, false, true>(sums, row_factors, keys, scores);
        else if (end == steps)
            end_chunk_of_scores<MR, NP, true, true>(sums, row_factors, keys, scores);
        else if (end <= kChunkSteps)
            end_chunk_of_scores<MR, NP, false, false>(sums, row_factors, keys, scores);
        else
            end_chunk_of_scores<MR, NP, true, false>(sums, row_factors, keys, scores);
    }
}

struct ArrangedKeys {
    const uint8_t* panels;
    size_t panel_bytes;
    const float* factors;
    inline __attribute__((always_inline)) void load(int step, H (&vectors)[2]) const {
        vectors[0] = hbits(iload(panels + step * kRowBytes));
        vectors[1] = hbits(iload(panels + panel_bytes + step * kRowBytes));
    }
    inline __attribute__((always_inline)) F factor(int panel) const { return vload(factors + panel * kPanelOutputs); }
};

struct ScoredTile {
    using Function = void (*)(const uint32_t*, int, const ArrangedKeys&, float*);
    template <int MR>
    static void run(const uint32_t* q, int head_dim, const ArrangedKeys& keys, float* scores) {
        score_keys<MR, 2>(q, row_factors(q, MR, head_dim), head_dim / 2, keys, scores);
    }
    template <int MR>
    static constexpr Function function() {
        return &run<MR>;
    }
};

constexpr auto kScoredTiles = by_rows<ScoredTile>(std::make_index_sequence<kScoredRows>());

// scores[rows][kTileKeys] with an arranged tile.
inline void score_half_tile(const uint32_t* q, int rows, const uint8_t* tile, int head_dim, int num_keys, float* scores) {
    const size_t panel_bytes = (size_t)head_dim / 2 * kRowBytes;
    const float* factors = key_factors((uint8_t*)tile, head_dim);
    for (int key = 0; key < num_keys; key += 2 * kPanelOutputs) {
        const ArrangedKeys keys{tile + key / kPanelOutputs * panel_bytes, panel_bytes, factors + key};
        for (int row = 0; row < rows; row += kScoredRows)
            kScoredTiles.entry[rows - row < kScoredRows ? rows - row : kScoredRows](q + (size_t)row * head_dim, head_dim, keys,
                                                                                    scores + row * kTileKeys + key);
    }
}

// The same of 16 keys as they are in the pool.
struct FewRowsHalfScores {
    using Function = void (*)(const uint32_t*, int, const uint8_t* const*, float*);
    struct Keys {
        const TurnedKeys& turned;
        inline __attribute__((always_inline)) void load(int step, H (&vectors)[1]) const { vectors[0] = turned.step(step); }
        inline __attribute__((always_inline)) F factor(int) const { return turned.factor; }
    };
    template <int MR>
    static void run(const uint32_t* q, int head_dim, const uint8_t* const* rows, float* scores) {
        const TurnedKeys turned(rows, head_dim / 2);
        score_keys<MR, 1>(q, row_factors(q, MR, head_dim), head_dim / 2, Keys{turned}, scores);
    }
    template <int MR>
    static constexpr Function function() {
        return &run<MR>;
    }
};

constexpr auto kFewRowsHalfScores = by_rows<FewRowsHalfScores>(std::make_index_sequence<kFewRows>());

}  // namespace
