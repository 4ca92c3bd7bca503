// O += P V of attention in half precision: weights P and values as float16, sums of a few keys in float16, O in float32.
//
//   value   exactly, times 4: from 2^-16 to below 128. A key with another one among 64 dims is odd for them.
//   weight  rounded to float16, twice in a word, so that one broadcast makes the factor of 32 dims
//   chain   of 16 keys: for each dim 16 FMAs in float16
//   chunk   of up to four chains, added in float16; at most 64 weights of 1 times 2^9, half of what a float16 holds
//   O       += each chunk of the tile in float32, then each odd key of the tile by itself, in float32
//
// Few rows and arranged tiles make the same sums in the same order, and which keys are odd is each key's own matter: a
// row's result depends neither on its neighbours nor on which of the two computes it. What is below 2^-16 becomes zero or
// nearly.
#pragma once
#include "kernels/attention_layout.h"
#include "kernels/half_sums.h"

namespace {

constexpr int kWeighedRows = 12;  // by 64 dims
constexpr int kWeighedChain = 16;
constexpr int kWeighedChunk = 4 * kWeighedChain;
constexpr int kValueDims = 32;       // in a vector of float16
constexpr int kValuePowers = 2;      // a float16 value is 2^2 times as large
constexpr float kValueScale = 1 << kValuePowers;
constexpr int kValueBias = (112 - kValuePowers) << tandem::kBf16MantissaBits;  // 112: between the formats' exponents
constexpr int kOddMagnitude = (127 + 7) << tandem::kBf16MantissaBits;          // of 128 as bfloat16, and of what is no number

// Magnitudes of bfloat16 values join `largest`.
inline __attribute__((always_inline)) I half_value(I value, I& largest) {
    const I magnitude = iand(value, _mm512_set1_epi16(0x7fff));
    largest = _mm512_max_epu16(largest, magnitude);
    const I shifted = _mm512_slli_epi16(_mm512_subs_epu16(magnitude, _mm512_set1_epi16(kValueBias)), 3);
    return _mm512_ternarylogic_epi32(shifted, value, _mm512_set1_epi16((int16_t)0x8000), 0xd8);  // the last chooses
}

inline bool has_odd_value(I largest) {
    return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16((int16_t)kOddMagnitude)) != 0;
}

constexpr int kSliceDims = 2 * kValueDims;
constexpr int kMostSlices = kMaxHeadDim / kSliceDims;

inline int slice_dims(int head_dim, int dim) { return head_dim - dim < kSliceDims ? kValueDims : kSliceDims; }

// Bits of the 16 keys whose values are odd for some dims.
inline __attribute__((noinline)) uint32_t find_odd_keys(const uint8_t* const* values, int dim, int dims) {
    uint32_t odd = 0;
    for (int key = 0; key < kPanelOutputs; ++key) {
        I largest = izero();
        for (int i = dim; i < dim + dims; i += kValueDims) half_value(iload(values[key] + 2 * i), largest);
        odd |= (uint32_t)has_odd_value(largest) << key;
    }
    return odd;
}

// Odd keys of a tile of values, kept behind its float16 values.
struct OddKeys {
    uint16_t keys[kMostSlices][kTileKeys / kPanelOutputs];  // a bit for each key of a panel
    const uint8_t* values[kTileKeys];                       // in the pool, of odd keys
};
static_assert(sizeof(OddKeys) <= (size_t)kTileKeys * kValueDims * 2, "it fits where float32 values would be");

inline OddKeys& odd_keys(uint8_t* tile, int head_dim) { return *(OddKeys*)(tile + (size_t)kTileKeys * head_dim * 2); }

// 16 weights, twice each.
inline void store_weight_pairs(uint32_t* to, F weights) {
    const I twice = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2,
                                     2, 1, 1, 0, 0);
    istore(to, _mm512_permutexvar_epi16(twice, _mm512_castsi256_si512(_mm256_castph_si256(_mm512_cvtxps_ph(weights)))));
}

// out[rows][head_dim] += weight times values of one odd key. p: its weight in each row, kTileKeys apart.
inline __attribute__((noinline)) void weigh_odd_key(const uint32_t* p, int rows, const uint8_t* values, int dims, float* out,
                                                    int head_dim) {
    for (int m = 0; m < rows; ++m, out += head_dim) {
        const float one = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128((int)p[m * kTileKeys])));
        const F weight = vset1(one * kValueScale);
        for (int dim = 0; dim < dims; dim += kWidth)
            vstore(out + dim, vfma(vload_bf16((const uint16_t*)values + dim), weight, vload(out + dim)));
    }
}

// A chain's sums, the one that begins with `key`, join those of its chunk's chains before it in `chunk`, and at its end O.
template <int MR, int NV>
inline __attribute__((always_inline)) void end_weighed_chain(HalfSums<MR, NV>& sums, HalfSums<MR, NV>& chunk, int key, int num_keys,
                                                             float* out, size_t stride) {
    const bool last = (key + kWeighedChain) % kWeighedChunk == 0 || key + kWeighedChain == num_keys;
    if (key % kWeighedChunk != 0) sums.join(chunk);
    if (!last) return sums.wait_in(chunk);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
        for (int i = 0; i < NV; ++i) {
            const I both = _mm512_castph_si512(sums.of[m][i]);
            const F low = _mm512_cvtxph_ps(_mm256_castsi256_ph(_mm512_castsi512_si256(both)));
            const F high = _mm512_cvtxph_ps(_mm256_castsi256_ph(_mm512_extracti64x4_epi64(both, 1)));
            float* to = out + m * stride + i * kValueDims;
            vstore(to, vadd(vload(to), low));
            vstore(to + kWidth, vadd(vload(to + kWidth), high));
        }
}

// out[MR][stride] += P V of NV vectors of dims. p: [MR][kTileKeys], v: [key][stride] float16.
template <int NV>
struct WeighedTile {
    using Function = void (*)(const uint32_t*, const uint16_t*, int, float*, size_t);
    template <int MR>
    static void run(const uint32_t* p, const uint16_t* v, int num_keys, float* out, size_t stride) {
        HalfSums<MR, NV> chunk;
        for (int key = 0; key < num_keys; key += kWeighedChain) {
            HalfSums<MR, NV> sums;
            H values[NV];
            load_values(v, values);
            sums.template start<kTileKeys>(values, p + key);
#pragma GCC unroll 3
            for (int step = 1; step < kWeighedChain; ++step) {
                load_values(v + step * stride, values);
                sums.template add<kTileKeys>(values, p + key + step);
            }
            v += kWeighedChain * stride;
            end_weighed_chain(sums, chunk, key, num_keys, out, stride);
        }
    }
    static inline __attribute__((always_inline)) void load_values(const uint16_t* v, H (&values)[NV]) {
#pragma GCC unroll 2
        for (int i = 0; i < NV; ++i) values[i] = hbits(iload(v + i * kValueDims));
    }
    template <int MR>
    static constexpr Function function() {
        return &run<MR>;
    }
};

constexpr auto kWeighed64 = by_rows<WeighedTile<2>>(std::make_index_sequence<kWeighedRows>());
constexpr auto kWeighed32 = by_rows<WeighedTile<1>>(std::make_index_sequence<kWeighedRows>());

// out[rows][head_dim] += P V with an arranged tile. p: [rows][kTileKeys].
inline void weigh_tile(const uint32_t* p, int rows, const uint8_t* tile, int head_dim, int num_keys, float* out) {
    const OddKeys& odd = odd_keys((uint8_t*)tile, head_dim);
    for (int dim = 0; dim < head_dim; dim += kSliceDims) {
        const int dims = slice_dims(head_dim, dim);
        const auto* tiles = dims == kSliceDims ? kWeighed64.entry : kWeighed32.entry;
        for (int row = 0; row < rows; row += kWeighedRows)
            tiles[rows - row < kWeighedRows ? rows - row : kWeighedRows](p + row * kTileKeys, (const uint16_t*)tile + dim, num_keys,
                                                                         out + (size_t)row * head_dim + dim, (size_t)head_dim);
        for (int panel = 0; panel < num_keys / kPanelOutputs; ++panel)
            for (uint32_t left = odd.keys[dim / kSliceDims][panel]; left; left &= left - 1) {
                const int key = panel * kPanelOutputs + __builtin_ctz(left);
                weigh_odd_key(p + key, rows, odd.values[key] + 2 * dim, dims, out + dim, head_dim);
            }
    }
}

// 16 keys' part of a tile: [key][head_dim] float16, zeros where a key is odd.
inline void arrange_half_values(const uint8_t* const* rows, int head_dim, int key, uint8_t* tile) {
    OddKeys& odd = odd_keys(tile, head_dim);
    uint16_t* to = (uint16_t*)tile + (size_t)key * head_dim;
    for (int dim = 0; dim < head_dim; dim += kSliceDims) {
        const int dims = slice_dims(head_dim, dim);
        I largest = izero();
        for (int i = 0; i < kPanelOutputs; ++i)
            for (int at = dim; at < dim + dims; at += kValueDims)
                istore(to + i * head_dim + at, half_value(iload(rows[i] + 2 * at), largest));
        const uint32_t found = has_odd_value(largest) ? find_odd_keys(rows, dim, dims) : 0;
        odd.keys[dim / kSliceDims][key / kPanelOutputs] = (uint16_t)found;
        for (uint32_t left = found; left; left &= left - 1) {
            const int i = __builtin_ctz(left);
            odd.values[key + i] = rows[i];
            __builtin_memset(to + i * head_dim + dim, 0, (size_t)dims * 2);
        }
    }
}

// The same sums from values as they are in the pool: NV vectors of dims from `dim` on.
template <int NV>
struct FewRowsHalfWeighted {
    using Function = void (*)(const uint32_t*, const uint8_t* const*, int, int, float*, int);
    template <int MR>
    static void run(const uint32_t* p, const uint8_t* const* values, int dim, int num_keys, float* out, int head_dim) {
        HalfSums<MR, NV> chunk;
        uint32_t odd[kTileKeys / kPanelOutputs] = {}, any = 0;
        for (int key = 0; key < num_keys; key += kWeighedChain) {
            HalfSums<MR, NV> sums;
            if (__builtin_expect(has_odd_value(add_chain(p + key, values + key, dim, 0, sums)), 0)) {
                const uint32_t found = find_odd_keys(values + key, dim, NV * kValueDims);
                odd[key / kPanelOutputs] = found;
                any |= found;
                add_chain(p + key, values + key, dim, found, sums);
            }
            end_weighed_chain(sums, chunk, key, num_keys, out + dim, (size_t)head_dim);
        }
        if (__builtin_expect(any == 0, 1)) return;
        for (int key = 0; key < num_keys; ++key)
            if (odd[key / kPanelOutputs] >> key % kPanelOutputs & 1)
                weigh_odd_key(p + key, MR, values[key] + 2 * dim, NV * kValueDims, out + dim, head_dim);
    }
    // The chain's sums without `odd` keys; returns the largest magnitudes of the others.
    template <int MR>
    static inline __attribute__((always_inline)) I add_chain(const uint32_t* p, const uint8_t* const* values, int dim, uint32_t odd,
                                                             HalfSums<MR, NV>& sums) {
        I largest = izero();
        H row[NV];
        load_values(odd & 1 ? kZeroRow : values[0] + 2 * dim, row, largest);
        sums.template start<kTileKeys>(row, p);
#pragma GCC unroll 3
        for (int key = 1; key < kWeighedChain; ++key) {
            load_values(odd >> key & 1 ? kZeroRow : values[key] + 2 * dim, row, largest);
            sums.template add<kTileKeys>(row, p + key);
        }
        return largest;
    }
    static inline __attribute__((always_inline)) void load_values(const uint8_t* from, H (&values)[NV], I& largest) {
#pragma GCC unroll 2
        for (int i = 0; i < NV; ++i) values[i] = hbits(half_value(iload(from + 2 * i * kValueDims), largest));
    }
    template <int MR>
    static constexpr Function function() {
        return &run<MR>;
    }
};

constexpr auto kFewRowsHalf64 = by_rows<FewRowsHalfWeighted<2>>(std::make_index_sequence<kFewRows>());
constexpr auto kFewRowsHalf32 = by_rows<FewRowsHalfWeighted<1>>(std::make_index_sequence<kFewRows>());

inline void weigh_few_rows(const uint32_t* p, int rows, const uint8_t* const* values, int head_dim, int num_keys, float* out) {
    for (int dim = 0; dim < head_dim; dim += kSliceDims)
        (slice_dims(head_dim, dim) == kSliceDims ? kFewRowsHalf64.entry : kFewRowsHalf32.entry)[rows](p, values, dim, num_keys, out, head_dim);
}

}  // namespace
