// Sums in float16 of MR rows and NV vectors of attention's products in half precision, in registers but for what waits.
#pragma once
#include "kernels/half_arithmetic.h"

namespace {

template <int MR, int NV>
struct HalfSums {
    H of[MR][NV];

    // The products of a chain's first step, and of the others. Rows' factors, a word each, are kStride apart.
    template <int kStride>
    inline __attribute__((always_inline)) void start(const H (&vectors)[NV], const uint32_t* factors) {
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
            const H factor = hpair(factors[m * kStride]);
#pragma GCC unroll 2
            for (int i = 0; i < NV; ++i) of[m][i] = _mm512_mul_ph(vectors[i], factor);
        }
    }
    template <int kStride>
    inline __attribute__((always_inline)) void add(const H (&vectors)[NV], const uint32_t* factors) {
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
            const H factor = hpair(factors[m * kStride]);
#pragma GCC unroll 2
            for (int i = 0; i < NV; ++i) of[m][i] = hfma(vectors[i], factor, of[m][i]);
        }
    }
    // Every loop here is unrolled: sums that a loop walks over would live in memory.
    inline __attribute__((always_inline)) void join(const HalfSums& others) {
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
            for (int i = 0; i < NV; ++i) of[m][i] = _mm512_add_ph(of[m][i], others.of[m][i]);
    }
    inline __attribute__((always_inline)) void wait_in(HalfSums& others) const {
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
            for (int i = 0; i < NV; ++i) others.of[m][i] = of[m][i];
    }
};

}  // namespace
