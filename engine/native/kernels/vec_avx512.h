// Vector operations for AVX-512 (F, BW, DQ, VL); BF16 and VNNI instructions where the file is compiled with them.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int kWidth = 16;
constexpr int kRegisters = 32;
using F = __m512;
using I = __m512i;

inline F vzero() { return _mm512_setzero_ps(); }
inline F vset1(float x) { return _mm512_set1_ps(x); }
inline F vload(const float* p) { return _mm512_loadu_ps(p); }
inline void vstore(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F vadd(F a, F b) { return _mm512_add_ps(a, b); }
inline F vsub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F vmul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F vdiv(F a, F b) { return _mm512_div_ps(a, b); }
inline F vmax(F a, F b) { return _mm512_max_ps(a, b); }
inline F vmin(F a, F b) { return _mm512_min_ps(a, b); }
inline F vabs(F a) { return _mm512_abs_ps(a); }
inline F vfma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F vfnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
inline float vsum(F a) { return _mm512_reduce_add_ps(a); }
inline float vmaximum(F a) { return _mm512_reduce_max_ps(a); }
// Lane i: the largest of rows[i]. Lanes of rows that are not there hold anything.
template <int kRows>
inline F vmaxima(const F (&rows)[kRows]) {
    static_assert(kRows == 4 || kRows == 16);
    F quads[kRows / 4];  // [128-bit lane][4 rows]
    for (int i = 0; i < kRows / 4; ++i) {
        F pairs[2];
        for (int j = 0; j < 2; ++j) {
            const F a = rows[4 * i + 2 * j], b = rows[4 * i + 2 * j + 1];
            pairs[j] = vmax(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        }
        const __m512d low = _mm512_castps_pd(pairs[0]), high = _mm512_castps_pd(pairs[1]);
        quads[i] = vmax(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    }
    constexpr int kAfter = kRows == 4 ? 0 : 1;
    F halves[kAfter + 1];
    for (int i = 0; i <= kAfter; ++i) {
        const F a = quads[2 * i * kAfter], b = quads[(2 * i + 1) * kAfter];
        halves[i] = vmax(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    return vmax(_mm512_shuffle_f32x4(halves[0], halves[kAfter], 0x88), _mm512_shuffle_f32x4(halves[0], halves[kAfter], 0xdd));
}
inline F vround(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// What a is above the next whole number below; 0 for an infinite one
inline F vfraction(F a) { return _mm512_reduce_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
constexpr bool kScalesAnyExponent = true;  // vscale below takes every n and rounds it down, vfraction every exponent
// x * 2^n for a whole n <= 127; 0 where that is below the smallest normal float or close to it
inline F vscale(F x, F n) { return _mm512_scalef_ps(x, n); }

inline I izero() { return _mm512_setzero_si512(); }
inline I iset1(int32_t x) { return _mm512_set1_epi32(x); }
inline I iload(const void* p) { return _mm512_loadu_si512(p); }
inline void istore(void* p, I x) { _mm512_storeu_si512(p, x); }
inline I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
inline I iand(I a, I b) { return _mm512_and_si512(a, b); }
inline I ixor(I a, I b) { return _mm512_xor_si512(a, b); }
// The 64-bit products of unsigned lanes with `factor`: upper and lower halves.
inline void imultiply_wide(I a, uint32_t factor, I* high, I* low) {
    const I f = _mm512_set1_epi32((int32_t)factor);
    const I even = _mm512_mul_epu32(a, f), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), f);
    *high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
    *low = _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
}
template <int N>
inline I ishift_left(I a) { return _mm512_slli_epi32(a, N); }
template <int N>
inline I ishift_right(I a) { return _mm512_srli_epi32(a, N); }
inline F vbits(I a) { return _mm512_castsi512_ps(a); }
inline I ibits(F a) { return _mm512_castps_si512(a); }
inline F vfrom_int(I a) { return _mm512_cvtepi32_ps(a); }
inline I ifrom_float(F a) { return _mm512_cvtps_epi32(a); }

// kWidth bfloat16 or float16 values as floats, and back with round to nearest even.
inline F vload_bf16(const uint16_t* p) {
    return vbits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline F vload_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void vstore_bf16(uint16_t* p, F x) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
    const I bits = ibits(x);
    const I odd = iand(_mm512_srli_epi32(bits, 16), iset1(1));
    I rounded = _mm512_srli_epi32(iadd(iadd(bits, iset1(0x7fff)), odd), 16);
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), iset1(0x7fc0));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(rounded));
#endif
}
// 2 kWidth of them: the instruction takes as long for two vectors as for one.
inline void vstore_bf16_pair(uint16_t* p, F first, F second) {
#ifdef __AVX512BF16__
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(second, first));
#else
    vstore_bf16(p, first);
    vstore_bf16(p + kWidth, second);
#endif
}
#ifdef __AVX512BF16__
inline F vround_to_bf16(F x) {
    return vbits(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}
#endif
// kWidth int32 in [-128, 127] as int8.
inline void istore_int8(int8_t* p, I x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }

// The lower and the upper bfloat16 of each 32-bit lane as floats.
inline F vwiden_low(I pairs) { return vbits(ishift_left<16>(pairs)); }
inline F vwiden_high(I pairs) { return vbits(iand(pairs, iset1((int32_t)0xffff0000))); }

// acc += w.low * x.low + w.high * x.high, bfloat16 pairs in each 32-bit lane.
inline F dot_bf16_pairs(F acc, I w, I x) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)x);
#else
    const I high = iset1((int32_t)0xffff0000);
    acc = vfma(vbits(ishift_left<16>(w)), vbits(ishift_left<16>(x)), acc);
    return vfma(vbits(iand(w, high)), vbits(iand(x, high)), acc);
#endif
}
// acc += sum of four products, w unsigned bytes and x signed bytes of each 32-bit lane; exact.
inline I dot_bytes(I acc, I w, I x) {
#ifdef __AVX512VNNI__
    return _mm512_dpbusd_epi32(acc, w, x);
#else
    const I even = _mm512_madd_epi16(iand(w, iset1(0x00ff00ff)), _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
    const I odd = _mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(x, 8));
    return iadd(acc, iadd(even, odd));
#endif
}

// The first `count` <= 16 words.
inline void copy_words(uint32_t* to, const uint32_t* from, int count) {
    _mm512_mask_storeu_epi32(to, (__mmask16)((1u << count) - 1), _mm512_loadu_si512(from));
}

// out[i][j] = rows[j] dword i, for 16 x 16 dwords; `out` has 16 dwords a row.
inline void transpose_16x16(const uint8_t* const* rows, int offset, uint32_t* out) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + 4 * offset);
    for (int i = 0; i < 8; ++i) {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
        b[4 + i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
        b[8 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        b[12 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        _mm512_storeu_si512(out + 16 * i, _mm512_shuffle_i32x4(b[i], b[8 + i], 0x88));
        _mm512_storeu_si512(out + 16 * (4 + i), _mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0x88));
        _mm512_storeu_si512(out + 16 * (8 + i), _mm512_shuffle_i32x4(b[i], b[8 + i], 0xdd));
        _mm512_storeu_si512(out + 16 * (12 + i), _mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0xdd));
    }
}

// out[2i] = a[i], out[2i + 1] = b[i], for 32 16-bit values.
inline void interleave_32(const uint16_t* a, const uint16_t* b, uint16_t* out_low, uint16_t* out_high) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    _mm512_storeu_si512(out_low, _mm512_permutex2var_epi16(x, low, y));
    _mm512_storeu_si512(out_high, _mm512_permutex2var_epi16(x, high, y));
}

}  // namespace
