// What stands between the products: norm, bias, rotary embedding, activation, KV store, embedding rows.
#pragma once
#include "kernel_table.h"
#include "kernels/vec.h"

namespace {

using tandem::KvType;
using tandem::PackedMatrix;
using tandem::NumberFormat;

constexpr float kExpLow = -87.3f;  // below it the result is 0, so that a mask of -inf gives exactly 0

// e^x for x <= 88: 2^n * p(r), Cephes' polynomial (relative error below 2e-7).
inline F vexp(F x) {
    const F bounded = vmin(vmax(x, vset1(kExpLow)), vset1(88.0f));
    const F n = vround(vmul(bounded, vset1(1.44269504088896341f)));
    F r = vfnma(n, vset1(0.693359375f), bounded);
    r = vfnma(n, vset1(-2.12194440e-4f), r);
    F p = vset1(1.9875691500e-4f);
    p = vfma(p, r, vset1(1.3981999507e-3f));
    p = vfma(p, r, vset1(8.3334519073e-3f));
    p = vfma(p, r, vset1(4.1665795894e-2f));
    p = vfma(p, r, vset1(1.6666665459e-1f));
    p = vfma(p, r, vset1(5.0000001201e-1f));
    p = vadd(vfma(p, vmul(r, r), r), vset1(1.0f));
    const I exponent = ishift_left<23>(iadd(ifrom_float(n), iset1(127)));
    return vkeep_where_ge(vmul(p, vbits(exponent)), x, vset1(kExpLow));
}

// sum(x^2) in float32, the last n % kWidth values one by one.
inline float sum_of_squares(const float* x, int n) {
    F sum0 = vzero(), sum1 = vzero();
    int i = 0;
    for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
        const F a = vload(x + i), b = vload(x + i + kWidth);
        sum0 = vfma(a, a, sum0);
        sum1 = vfma(b, b, sum1);
    }
    float sum = vsum(vadd(sum0, sum1));
    for (; i < n; ++i) sum += x[i] * x[i];
    return sum;
}

inline void rms_norm(const float* x, size_t stride, int rows, int n, const float* weight, float epsilon, float* out,
                     size_t out_stride) {
    for (int row = 0; row < rows; ++row) {
        const float* from = x + row * stride;
        float* to = out + row * out_stride;
        const float inverse = 1.0f / __builtin_sqrtf(sum_of_squares(from, n) / (float)n + epsilon);
        int i = 0;
        for (; i + kWidth <= n; i += kWidth)
            vstore(to + i, vmul(vmul(vload(from + i), vset1(inverse)), vload(weight + i)));
        for (; i < n; ++i) to[i] = from[i] * inverse * weight[i];
    }
}

inline void add_bias(float* x, size_t stride, int rows, int n, const float* bias) {
    for (int row = 0; row < rows; ++row)
        for (int i = 0; i < n; ++i) x[row * stride + i] += bias[i];
}

inline F silu(F gate) { return vdiv(gate, vadd(vset1(1.0f), vexp(vsub(vzero(), gate)))); }

inline void silu_multiply(const float* x, size_t stride, int rows, int n, float* out, size_t out_stride) {
    for (int row = 0; row < rows; ++row) {
        const float *gate = x + row * stride, *up = gate + n;
        float* to = out + row * out_stride;
        int i = 0;
        for (; i + kWidth <= n; i += kWidth) vstore(to + i, vmul(silu(vload(gate + i)), vload(up + i)));
        if (i < n) {
            float g[kWidth] = {};
            for (int j = 0; i + j < n; ++j) g[j] = gate[i + j];
            vstore(g, silu(vload(g)));
            for (int j = 0; i + j < n; ++j) to[i + j] = g[j] * up[i + j];
        }
    }
}

inline void rotate(float* head, int head_dim, const float* cos, const float* sin) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; ++i) {
        const float a = head[i], b = head[half + i];
        head[i] = a * cos[i] - b * sin[i];
        head[half + i] = b * cos[i] + a * sin[i];
    }
}

inline void store_kv(const float* row, int head_dim, KvType type, void* destination) {
    if (type == KvType::kBf16) {
        for (int i = 0; i < head_dim; i += kWidth) vstore_bf16((uint16_t*)destination + i, vload(row + i));
    } else {
        for (int i = 0; i < head_dim; i += kWidth) vstore((float*)destination + i, vload(row + i));
    }
}

}  // namespace
