#include "half_panel.h"

#include <algorithm>
#include <cmath>

namespace tandem {

namespace {

constexpr int kMagnitude = 0x7fff, kMantissaOne = 1 << kBf16MantissaBits;
constexpr int kInfiniteExponent = 255, kHalfOffset = 112;  // 127 - 15, between the two formats' exponents
// Of an output's weights, relative to their root of squares: a quarter of what rounding activations to bfloat16 costs.
constexpr double kMostLost = 1.0 / 2048;

int magnitude_of(uint16_t bits) { return bits & kMagnitude; }

// In units of the float16 value 2^-15 with mantissa bits as a fraction of 128.
double scaled(int magnitude, int bias) {
    const int exponent = magnitude >> kBf16MantissaBits, mantissa = magnitude & (kMantissaOne - 1);
    if (exponent == 0) return std::ldexp((double)mantissa, 1 - bias);
    return std::ldexp((double)(mantissa + kMantissaOne), exponent - bias);
}

double scaled_half(int magnitude, int bias) {
    const int left = std::max(0, magnitude - (bias << kBf16MantissaBits));
    return left < kMantissaOne ? 2.0 * left : scaled(left, 0);  // float16's subnormals count twice their exponent 0
}

// Whether what single outputs lose is little enough.
bool loses_little(const uint16_t* weights, int k_padded, int bias) {
    double squares[kPanelOutputs] = {}, lost[kPanelOutputs] = {};
    for (int row = 0; row < k_padded / 2; ++row)
        for (int i = 0; i < 2 * kPanelOutputs; ++i) {
            const int magnitude = magnitude_of(weights[row * 2 * kPanelOutputs + i]);
            const double value = scaled(magnitude, bias), difference = value - scaled_half(magnitude, bias);
            squares[i / 2] += value * value;
            lost[i / 2] += difference * difference;
        }
    for (int output = 0; output < kPanelOutputs; ++output)
        if (lost[output] > kMostLost * kMostLost * squares[output]) return false;
    return true;
}

}  // namespace

HalfPanel half_panel(const uint8_t* plain, int k_padded) {
    const uint16_t* weights = (const uint16_t*)plain;
    const size_t count = (size_t)k_padded * kPanelOutputs;
    uint16_t largest = 0, smallest = UINT16_MAX;  // magnitudes, the smallest one less and without zeros
    for (size_t i = 0; i < count; ++i) {
        const uint16_t magnitude = weights[i] & kMagnitude;
        largest = std::max(largest, magnitude);
        smallest = std::min(smallest, (uint16_t)(magnitude - 1));
    }
    const int top = largest >> kBf16MantissaBits;
    HalfPanel half;
    half.bias = (uint16_t)(std::max(0, top - kHalfTopExponent + 1) / 2 * 2);
    half.exponent = (float)(half.bias - kHalfOffset);
    const bool whole = smallest + 1 >= (half.bias + 1) << kBf16MantissaBits;  // true of zeros alone
    half.fits = top < kInfiniteExponent && (whole || loses_little(weights, k_padded, half.bias));
    return half;
}

void set_half_panel(PackedMatrix& matrix, int panel, const HalfPanel& half) {
    matrix.unfit_panels += (int)matrix.half[panel].fits - (int)half.fits;
    matrix.half[panel] = half;
}

bool half_needs_exception(const HalfPanel& half, const uint8_t* plain, int k_padded, uint8_t high_byte) {
    if ((high_byte & 0x7f) >= half.bias / 2) return false;
    const uint16_t* weights = (const uint16_t*)plain;
    const uint16_t least = (uint16_t)(high_byte << 8 | 1), most = (uint16_t)(high_byte << 8 | 0xff);
    for (int row = 0; row < k_padded / 2; ++row) {
        int found = 0;  // of a row at once: without an end in between the compiler compares many at once
        for (int i = 0; i < 2 * kPanelOutputs; ++i) {
            const uint16_t weight = weights[row * 2 * kPanelOutputs + i];
            found |= (weight >= least) & (weight <= most);
        }
        if (found) return true;
    }
    return false;
}

void fill_half_table(HalfPanel& half, const uint8_t* high_bytes) {
    for (int i = 0; i < kTableEntriesOfHalf; ++i) {
        const int exponent = std::clamp((high_bytes[i] & 0x7f) - half.bias / 2, 0, 15);
        half.table[i] = (uint8_t)((high_bytes[i] & 0x80) >> 3 | exponent);
    }
}

}  // namespace tandem
