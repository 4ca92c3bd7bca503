// One row of a packed matrix as float32: the embedding of a token, also where the table is the output head.
#pragma once
#include "kernel_table.h"
#include "kernels/vec.h"

namespace {

inline float scalar_f16(const uint8_t* p) {
    uint16_t padded[kWidth] = {};
    padded[0] = *(const uint16_t*)p;
    float out[kWidth];
    vstore(out, vload_f16(padded));
    return out[0];
}

inline float bf16_to_float(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float out;
    __builtin_memcpy(&out, &bits, 4);
    return out;
}

inline void embed_block(NumberFormat format, const uint8_t* block, int lane, float* out) {
    const bool nibbles = format != NumberFormat::kQ8_0;
    const uint8_t* scales = block + (nibbles ? 4 : 8) * tandem::kRowBytes;
    const float d = scalar_f16(scales + 2 * lane);
    const float low = format == NumberFormat::kQ4_1 ? scalar_f16(scales + tandem::kHalfRowBytes + 2 * lane) : 0.0f;
    const int offset = format == NumberFormat::kQ4_0 ? 8 : (format == NumberFormat::kQ8_0 ? 128 : 0);
    for (int i = 0; i < tandem::kBlockInputs; ++i) {
        const uint8_t* row = block + (nibbles ? i / 8 : i / 4) * tandem::kRowBytes + 4 * lane;
        const int q = nibbles ? (row[i % 4] >> (i % 8 >= 4 ? 4 : 0)) & 15 : row[i % 4];
        out[i] = d * (float)(q - offset) + low;
    }
}

inline void embed(const PackedMatrix& table, int token, float* out) {
    const uint8_t* panel = table.panel(token / tandem::kPanelOutputs);
    const int lane = token % tandem::kPanelOutputs;
    if (table.format == NumberFormat::kF32) {
        for (int i = 0; i < table.k; ++i) out[i] = ((const float*)(panel + i * tandem::kRowBytes))[lane];
    } else if (table.format == NumberFormat::kBf16) {
        for (int i = 0; i < table.k; ++i)
            out[i] = bf16_to_float(((const uint16_t*)(panel + i / 2 * tandem::kRowBytes))[2 * lane + i % 2]);
    } else {
        const size_t step = tandem::block_bytes(table.format);
        for (int first = 0; first < table.k; first += tandem::kBlockInputs)
            embed_block(table.format, panel + first / tandem::kBlockInputs * step, lane, out + first);
    }
}

}  // namespace
