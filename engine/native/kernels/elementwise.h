// What stands between the products: norm, bias, rotary embedding, activation, KV store, embedding rows.
#pragma once
#include "kernel_table.h"
#include "kernels/vec.h"

namespace {

using tandem::KvType;
using tandem::PackedMatrix;
using tandem::NumberFormat;

constexpr float kLog2E = 1.44269504088896341f;

// 2^x for x <= 127, exactly 0 for x of -200 and below (so for a mask of -inf): 2^n * p(x - n), Cephes' polynomial
// (relative error below 2e-7).
inline F vexp2(F x) {
    const F bounded = vmax(x, vset1(-200.0f));
    const F n = vround(bounded);
    const F r = vsub(bounded, n);
    F p = vset1(1.535336188319500e-4f);
    p = vfma(p, r, vset1(1.339887440266574e-3f));
    p = vfma(p, r, vset1(9.618437357674640e-3f));
    p = vfma(p, r, vset1(5.550332471162809e-2f));
    p = vfma(p, r, vset1(2.402264791363012e-1f));
    p = vfma(p, r, vset1(6.931472028550421e-1f));
    return vscale(vfma(p, r, vset1(1.0f)), n);
}

// The same for what is rounded to bfloat16 afterwards, or multiplies what was: the best polynomial of degree 3 from a whole
// number to the next, relative error below 8e-5, a twenty-fifth of what the rounding adds.
inline F vexp2_for_bf16(F x) {
    const F bounded = kScalesAnyExponent ? x : vmax(x, vset1(-200.0f));
    const F r = vfraction(bounded);
    F p = vset1(0.07802451f);
    p = vfma(p, r, vset1(0.22606717f));
    p = vfma(p, r, vset1(0.69583354f));
    return vscale(vfma(p, r, vset1(0.99992521f)), kScalesAnyExponent ? bounded : vsub(bounded, r));
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

// gate / (1 + e^-gate); the exponent is bounded where the result is 0 anyway.
inline F silu(F gate) {
    return vdiv(gate, vadd(vset1(1.0f), vexp2(vmin(vmul(gate, vset1(-kLog2E)), vset1(126.0f)))));
}

// out[:, i] = silu(x[:, i]) * x[:, 16 + i] for 16 columns.
inline void silu_multiply(const float* x, size_t stride, int rows, float* out, size_t out_stride) {
    for (int row = 0; row < rows; ++row)
        for (int i = 0; i < tandem::kPanelOutputs; i += kWidth) {
            const float* gate = x + row * stride + i;
            vstore(out + row * out_stride + i, vmul(silu(vload(gate)), vload(gate + tandem::kPanelOutputs)));
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
