// The passes over a vocabulary that top-k, top-p and min-p need (`filtering.cpp` puts them together).
#pragma once
#include "kernels/elementwise.h"

namespace {

// Values of this many tokens are looked at together: most groups hold nothing that is wanted.
constexpr int kFilterGroup = 64;

// row = (row - peak) / temperature.
inline void scale_row(float* row, int n, float peak, float temperature) {
    if (temperature == 1.0f)
        for (int i = 0; i < n; ++i) row[i] -= peak;
    else
        for (int i = 0; i < n; ++i) row[i] = (row[i] - peak) / temperature;
}

// weights[i] = e^row[i] of kFilterGroup values, all below 88.
inline void exponentials_of_group(const float* row, float* weights) {
    for (int i = 0; i < kFilterGroup; i += kWidth) vstore(weights + i, vexp2(vmul(vload(row + i), vset1(kLog2E))));
}

// weights[i] = e^values[i] for n values.
inline void exponentials(const float* values, int n, float* weights) {
    int i = 0;
    for (; i + kFilterGroup <= n; i += kFilterGroup) exponentials_of_group(values + i, weights + i);
    if (i == n) return;
    alignas(64) float padded[kFilterGroup] = {}, last[kFilterGroup];
    for (int j = i; j < n; ++j) padded[j - i] = values[j];
    exponentials_of_group(padded, last);
    for (int j = i; j < n; ++j) weights[j] = last[j - i];
}

// The sum of e^x over the values of at least `least`, and how many these are.
inline double mass_at_least(const float* row, int n, float least, int* count) {
    alignas(64) float padded[kFilterGroup], weights[kFilterGroup];
    double mass = 0.0;
    int found = 0;
    for (int first = 0; first < n; first += kFilterGroup) {
        const int size = first + kFilterGroup < n ? kFilterGroup : n - first;
        const float* values = row + first;
        if (size < kFilterGroup) {
            for (int i = 0; i < kFilterGroup; ++i) padded[i] = i < size ? values[i] : -__builtin_inff();
            values = padded;
        }
        exponentials_of_group(values, weights);
        for (int i = 0; i < kFilterGroup; ++i) weights[i] = values[i] >= least ? weights[i] : 0.0f;
        for (int i = 0; i < size; ++i) found += values[i] >= least;
        F sum = vzero();
        for (int i = 0; i < kFilterGroup; i += kWidth) sum = vadd(sum, vload(weights + i));
        mass += (double)vsum(sum);
    }
    *count = found;
    return mass;
}

// Copies the values of at least `least` in their order; returns how many these are.
inline int collect_at_least(const float* row, int n, float least, float* found) {
    int count = 0;
    for (int first = 0; first < n; first += kFilterGroup) {
        const int end = first + kFilterGroup < n ? first + kFilterGroup : n;
        int i = first;
        if (end - first == kFilterGroup) {
            F highest = vload(row + first);
            for (int j = kWidth; j < kFilterGroup; j += kWidth) highest = vmax(highest, vload(row + first + j));
            if (vmaximum(highest) < least) continue;
        }
        for (; i < end; ++i)
            if (row[i] >= least) found[count++] = row[i];
    }
    return count;
}

inline void drop_below(float* row, int n, float least) {
    for (int i = 0; i < n; ++i) row[i] = row[i] < least ? -__builtin_inff() : row[i];
}

}  // namespace
