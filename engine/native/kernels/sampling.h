// argmax of scaled logits + Gumbel noise: `engine.noise` and `engine.sampler.gumbel_argmax`, bit for bit.
//
// A token can win only where 1 - u <= 2^((scaled - noise of the peak) log2(e)); bits are made for groups of 64 tokens in
// which some token can pass, and logarithms for the few that do.
#pragma once
#include "kernel_table.h"
#include "kernels/elementwise.h"

namespace {

using tandem::NoiseKey;

constexpr int kGroupTokens = 64;
constexpr float kSmallestGap = 1.0f / 33554432.0f;  // 2^-25
constexpr float kBoundSlack = 1.01f;                // more than float32 can err in the bound

// Philox4x32-10 of kWidth consecutive counters: word j of counter first + i goes to words[4 * i + j], so the words of
// all tokens stand in the order of the tokens.
inline void philox(uint32_t first, const NoiseKey& key, uint32_t* words) {
    alignas(64) int32_t lanes[4][kWidth];
    for (int i = 0; i < kWidth; ++i) lanes[0][i] = (int32_t)(first + (uint32_t)i);
    I a = iload(lanes[0]), b = iset1((int32_t)key.position), c = iset1((int32_t)key.choice_index);
    I d = izero();  // the purpose: a sample
    uint32_t low_key = (uint32_t)key.seed, high_key = (uint32_t)(key.seed >> 32);
    for (int round = 0; round < 10; ++round) {
        I high_0, low_0, high_1, low_1;
        imultiply_wide(a, 0xD2511F53u, &high_0, &low_0);
        imultiply_wide(c, 0xCD9E8D57u, &high_1, &low_1);
        a = ixor(ixor(high_1, b), iset1((int32_t)low_key));
        c = ixor(ixor(high_0, d), iset1((int32_t)high_key));
        b = low_1;
        d = low_0;
        low_key += 0x9E3779B9u;
        high_key += 0xBB67AE85u;
    }
    istore(lanes[0], a);
    istore(lanes[1], b);
    istore(lanes[2], c);
    istore(lanes[3], d);
    for (int i = 0; i < kWidth; ++i)
        for (int j = 0; j < 4; ++j) words[4 * i + j] = (uint32_t)lanes[j][i];
}

// fdlibm's logarithm of a positive normal number in plain double operations (no fused ones): see engine/noise.py.
inline double frozen_ln(double value) {
    uint64_t bits;
    __builtin_memcpy(&bits, &value, 8);
    double k = (double)((int64_t)(bits >> 52) - 1022), mantissa;
    bits = (bits & 0xfffffffffffffull) | (1022ull << 52);
    __builtin_memcpy(&mantissa, &bits, 8);
    if (mantissa < 0.70710678118654752440) {
        mantissa *= 2.0;
        k -= 1.0;
    }
    const double f = mantissa - 1.0, s = f / (2.0 + f), z = s * s, w = z * z;
    const double even = w * (0.3999999999940941908 + w * (0.2222219843214978396 + w * 0.1531383769920937332));
    const double odd = z * (0.6666666666666735130 +
                            w * (0.2857142874366239149 + w * (0.1818357216161805012 + w * 0.1479819860511658591)));
    const double half_square = 0.5 * f * f;
    const double correction = s * (half_square + (even + odd)) + k * 1.90821492927058770002e-10;
    return k * 6.93147180369123816490e-01 - ((half_square - correction) - f);
}

inline double gumbel_of(uint32_t word) {
    const double uniform = (2.0 * (double)(word >> 8) + 1.0) * (double)kSmallestGap;
    return -frozen_ln(-frozen_ln(uniform));
}

// 1 - u of each lane, rounded to float32.
inline F gap_of(I words) {
    const F high = vsub(vset1(1.0f), vmul(vfrom_int(ishift_right<8>(words)), vset1(1.0f / 16777216.0f)));
    return vsub(high, vset1(kSmallestGap));
}

// Bounds of one group of tokens; returns whether any is reachable. Tokens past the vocabulary get 0.
inline bool bound_group(const float* scaled, int count, float peak_noise, float* bounds) {
    alignas(64) float padded[kGroupTokens];
    if (count < kGroupTokens) {
        for (int i = 0; i < kGroupTokens; ++i) padded[i] = i < count ? scaled[i] : -__builtin_inff();
        scaled = padded;
    }
    F highest = vzero();
    for (int i = 0; i < kGroupTokens; i += kWidth) {
        const F exponent = vmul(vsub(vload(scaled + i), vset1(peak_noise)), vset1(kLog2E));
        const F bound = vmul(vexp2(exponent), vset1(kBoundSlack));
        vstore(bounds + i, bound);
        highest = vmax(highest, bound);
    }
    return vmaximum(highest) >= kSmallestGap;
}

// Makes the group's bits and notes in `passes` which tokens reach their gap; returns whether any does.
inline bool draw_group(int first, const NoiseKey& key, const float* bounds, uint32_t* words, float* passes) {
    F highest = vset1(-1.0f);
    for (int i = 0; i < kGroupTokens; i += 4 * kWidth) philox((uint32_t)(first + i) / 4, key, words + i);
    for (int i = 0; i < kGroupTokens; i += kWidth) {
        const F margin = vsub(vload(bounds + i), gap_of(iload(words + i)));
        vstore(passes + i, margin);
        highest = vmax(highest, margin);
    }
    return vmaximum(highest) >= 0.0f;
}

inline int64_t gumbel_argmax(const float* scaled, int vocab_size, int64_t peak, const NoiseKey& key) {
    alignas(64) uint32_t words[kGroupTokens];
    alignas(64) float bounds[kGroupTokens], passes[kGroupTokens];
    philox((uint32_t)(peak >> 2), key, words);
    const float peak_noise = (float)gumbel_of(words[peak & 3]);
    int64_t winner = peak;
    double best = -__builtin_inf();
    for (int first = 0; first < vocab_size; first += kGroupTokens) {
        const int count = vocab_size - first < kGroupTokens ? vocab_size - first : kGroupTokens;
        if (!bound_group(scaled + first, count, peak_noise, bounds)) continue;
        if (!draw_group(first, key, bounds, words, passes)) continue;
        for (int i = 0; i < count; ++i) {
            if (passes[i] < 0.0f || bounds[i] < kSmallestGap) continue;
            const double score = (double)scaled[first + i] + gumbel_of(words[i]);
            if (score > best) best = score, winner = first + i;
        }
    }
    return winner;
}

}  // namespace
