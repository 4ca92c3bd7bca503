// Data movement that only AVX-512 has fast instructions for, as plain loops.
#pragma once
#include <cstdint>

namespace {

inline void copy_words(uint32_t* to, const uint32_t* from, int count) {
    for (int i = 0; i < count; ++i) to[i] = from[i];
}

inline void transpose_16x16(const uint8_t* const* rows, int offset, uint32_t* out) {
    for (int j = 0; j < 16; ++j)
        for (int i = 0; i < 16; ++i) __builtin_memcpy(out + 16 * i + j, rows[j] + 4 * (offset + i), 4);
}

inline void interleave_32(const uint16_t* a, const uint16_t* b, uint16_t* out_low, uint16_t* out_high) {
    for (int i = 0; i < 16; ++i) {
        out_low[2 * i] = a[i];
        out_low[2 * i + 1] = b[i];
        out_high[2 * i] = a[16 + i];
        out_high[2 * i + 1] = b[16 + i];
    }
}

}  // namespace
