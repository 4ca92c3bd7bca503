// Vector operations for AVX2 with FMA and F16C: the same names as vec_avx512.h, eight lanes.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int kWidth = 8;
constexpr int kRegisters = 16;
using F = __m256;
using I = __m256i;

inline F vzero() { return _mm256_setzero_ps(); }
inline F vset1(float x) { return _mm256_set1_ps(x); }
inline F vload(const float* p) { return _mm256_loadu_ps(p); }
inline void vstore(float* p, F x) { _mm256_storeu_ps(p, x); }
inline F vadd(F a, F b) { return _mm256_add_ps(a, b); }
inline F vsub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F vmul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F vdiv(F a, F b) { return _mm256_div_ps(a, b); }
inline F vmax(F a, F b) { return _mm256_max_ps(a, b); }
inline F vmin(F a, F b) { return _mm256_min_ps(a, b); }
inline F vabs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline F vfma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F vfnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
inline float vsum(F a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline float vmaximum(F a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline F vround(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline I izero() { return _mm256_setzero_si256(); }
inline I iset1(int32_t x) { return _mm256_set1_epi32(x); }
inline I iload(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void istore(void* p, I x) { _mm256_storeu_si256((__m256i*)p, x); }
inline I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
inline I iand(I a, I b) { return _mm256_and_si256(a, b); }
inline I ixor(I a, I b) { return _mm256_xor_si256(a, b); }
inline void imultiply_wide(I a, uint32_t factor, I* high, I* low) {
    const I f = _mm256_set1_epi32((int32_t)factor);
    const I even = _mm256_mul_epu32(a, f), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), f);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}
template <int N>
inline I ishift_left(I a) { return _mm256_slli_epi32(a, N); }
template <int N>
inline I ishift_right(I a) { return _mm256_srli_epi32(a, N); }
inline F vbits(I a) { return _mm256_castsi256_ps(a); }
inline I ibits(F a) { return _mm256_castps_si256(a); }
inline F vfrom_int(I a) { return _mm256_cvtepi32_ps(a); }
inline I ifrom_float(F a) { return _mm256_cvtps_epi32(a); }

inline F vfraction(F a) { return vsub(a, _mm256_floor_ps(a)); }
constexpr bool kScalesAnyExponent = false;
inline F vscale(F x, F n) {
    const F power = vbits(_mm256_slli_epi32(iadd(ifrom_float(vmax(n, vset1(-127.0f))), iset1(127)), 23));
    return vmul(x, power);  // n of -127 and below gives the power 0
}

inline F vload_bf16(const uint16_t* p) {
    return vbits(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline F vload_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline __m128i narrow_to_16(I x) {
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x88));
}
inline void vstore_bf16(uint16_t* p, F x) {
    const I bits = ibits(x);
    const I odd = iand(_mm256_srli_epi32(bits, 16), iset1(1));
    I rounded = _mm256_srli_epi32(iadd(iadd(bits, iset1(0x7fff)), odd), 16);
    rounded = _mm256_blendv_epi8(rounded, iset1(0x7fc0), ibits(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    _mm_storeu_si128((__m128i*)p, narrow_to_16(rounded));
}
inline void vstore_bf16_pair(uint16_t* p, F first, F second) {
    vstore_bf16(p, first);
    vstore_bf16(p + kWidth, second);
}
inline void istore_int8(int8_t* p, I x) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}

inline F dot_bf16_pairs(F acc, I w, I x) {
    const I high = iset1((int32_t)0xffff0000);
    acc = vfma(vbits(ishift_left<16>(w)), vbits(ishift_left<16>(x)), acc);
    return vfma(vbits(iand(w, high)), vbits(iand(x, high)), acc);
}
inline I dot_bytes(I acc, I w, I x) {
    const I even = _mm256_madd_epi16(iand(w, iset1(0x00ff00ff)), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    const I odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
    return iadd(acc, iadd(even, odd));
}

// Lane i: the largest of rows[i]. Lanes of rows that are not there hold anything.
template <int kRows>
inline F vmaxima(const F (&rows)[kRows]) {
    float largest[kWidth] = {};
    for (int i = 0; i < kRows; ++i) largest[i] = vmaximum(rows[i]);
    return vload(largest);
}

}  // namespace

#include "kernels/plain_shuffles.h"
