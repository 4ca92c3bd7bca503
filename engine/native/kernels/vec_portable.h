// Vector operations for any processor, four lanes in the compiler's own vector type: the same names as vec_avx512.h.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

constexpr int kWidth = 4;
constexpr int kRegisters = 16;
typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));

inline F vset1(float x) { return F{x, x, x, x}; }
inline F vzero() { return vset1(0.0f); }
inline F vload(const float* p) {
    F x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline void vstore(float* p, F x) { std::memcpy(p, &x, sizeof x); }
inline F vadd(F a, F b) { return a + b; }
inline F vsub(F a, F b) { return a - b; }
inline F vmul(F a, F b) { return a * b; }
inline F vdiv(F a, F b) { return a / b; }
inline I iset1(int32_t x) { return I{x, x, x, x}; }
inline I izero() { return iset1(0); }
inline F vbits(I a) { return (F)a; }
inline I ibits(F a) { return (I)a; }
inline F vselect(I mask, F a, F b) { return vbits((ibits(a) & mask) | (ibits(b) & ~mask)); }
inline F vmax(F a, F b) { return vselect(a > b, a, b); }
inline F vmin(F a, F b) { return vselect(a < b, a, b); }
inline F vabs(F a) { return vbits(ibits(a) & iset1(0x7fffffff)); }
inline F vfma(F a, F b, F c) { return a * b + c; }
inline F vfnma(F a, F b, F c) { return c - a * b; }
inline float vsum(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }
inline float vmaximum(F a) {
    const float low = a[0] > a[1] ? a[0] : a[1], high = a[2] > a[3] ? a[2] : a[3];
    return low > high ? low : high;
}
// Adding and removing 1.5 * 2^23 rounds to the nearest even integer for |a| < 2^22, which is all that callers need.
inline F vround(F a) {
    const F shifted = a + vset1(12582912.0f);
    return shifted - vset1(12582912.0f);
}

inline I iload(const void* p) {
    I x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline void istore(void* p, I x) { std::memcpy(p, &x, sizeof x); }
inline I iadd(I a, I b) { return a + b; }
inline I iand(I a, I b) { return a & b; }
inline I ixor(I a, I b) { return a ^ b; }
inline void imultiply_wide(I a, uint32_t factor, I* high, I* low) {
    for (int i = 0; i < kWidth; ++i) {
        const uint64_t product = (uint64_t)factor * (uint32_t)a[i];
        (*high)[i] = (int32_t)(product >> 32);
        (*low)[i] = (int32_t)(uint32_t)product;
    }
}
template <int N>
inline I ishift_left(I a) { return (I)((U)a << N); }
template <int N>
inline I ishift_right(I a) { return (I)((U)a >> N); }
inline F vfrom_int(I a) { return F{(float)a[0], (float)a[1], (float)a[2], (float)a[3]}; }
inline I ifrom_float(F a) {
    const F r = vround(a);
    return I{(int32_t)r[0], (int32_t)r[1], (int32_t)r[2], (int32_t)r[3]};
}

inline F vfraction(F a) {
    const F r = vsub(a, vround(a));
    return r < vzero() ? vadd(r, vset1(1.0f)) : r;
}
constexpr bool kScalesAnyExponent = false;
inline F vscale(F x, F n) {
    return vmul(x, vbits(ishift_left<23>(iadd(ifrom_float(vmax(n, vset1(-127.0f))), iset1(127)))));
}

inline F vload_bf16(const uint16_t* p) {
    return vbits(I{(int32_t)p[0] << 16, (int32_t)p[1] << 16, (int32_t)p[2] << 16, (int32_t)p[3] << 16});
}
inline float half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 0x1f, mantissa = h & 0x3ff;
    uint32_t bits;
    if (exponent == 0) {
        const float value = (float)mantissa * (1.0f / 16777216.0f);  // subnormal: mantissa * 2^-24
        std::memcpy(&bits, &value, 4);
    } else {
        bits = exponent == 31 ? 0x7f800000u | (mantissa << 13) : ((exponent + 112) << 23) | (mantissa << 13);
    }
    bits |= sign;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
inline F vload_f16(const uint16_t* p) {
    return F{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
inline void vstore_bf16(uint16_t* p, F x) {
    const I bits = ibits(x);
    const I rounded = ishift_right<16>(bits + iset1(0x7fff) + (ishift_right<16>(bits) & iset1(1)));
    for (int i = 0; i < kWidth; ++i) p[i] = x[i] == x[i] ? (uint16_t)rounded[i] : 0x7fc0;
}
inline void vstore_bf16_pair(uint16_t* p, F first, F second) {
    vstore_bf16(p, first);
    vstore_bf16(p + kWidth, second);
}
inline void istore_int8(int8_t* p, I x) {
    for (int i = 0; i < kWidth; ++i) p[i] = (int8_t)x[i];
}

inline F dot_bf16_pairs(F acc, I w, I x) {
    const I high = iset1((int32_t)0xffff0000);
    acc = vfma(vbits(ishift_left<16>(w)), vbits(ishift_left<16>(x)), acc);
    return vfma(vbits(w & high), vbits(x & high), acc);
}
inline I dot_bytes(I acc, I w, I x) {
    acc += (w & iset1(0xff)) * ((I)(x << 24) >> 24);
    acc += ((w >> 8) & iset1(0xff)) * ((I)(x << 16) >> 24);
    acc += ((w >> 16) & iset1(0xff)) * ((I)(x << 8) >> 24);
    return acc + ((w >> 24) & iset1(0xff)) * (x >> 24);
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
