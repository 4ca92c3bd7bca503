// One row of a packed matrix as float32: the embedding of a token, also where the table is the output head.
#pragma once
#include "compressed_panel.h"
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

inline void embed_bf16(const uint8_t* panel, int lane, int k, float* out) {
    for (int i = 0; i < k; ++i)
        out[i] = bf16_to_float(((const uint16_t*)(panel + i / 2 * tandem::kRowBytes))[2 * lane + i % 2]);
}

// Where input i of an output stands in its group's rows of BF16.
inline int offset_in_group(int i, int lane) {
    return i % tandem::kGroupInputs / 2 * (int)tandem::kRowBytes + 4 * lane + 2 * (i % 2);
}

inline void embed_compressed(const uint8_t* panel, int lane, int k, float* out) {
    const auto& header = *(const tandem::CompressedHeader*)panel;
    const uint8_t* groups = panel + sizeof header;
    for (int i = 0; i < k; ++i) {
        const uint8_t* group = groups + i / tandem::kGroupInputs * tandem::kGroupBytes;
        const int place = tandem::low_byte_place(offset_in_group(i, lane));
        const int entry = group[place % 64] >> (place / 64 * 4) & 15;
        out[i] = bf16_to_float((uint16_t)(header.table[entry] << 8 | group[tandem::kRowBytes + place]));
    }
    for (int e = 0; e < header.num_exceptions; ++e) {
        const tandem::HighByteException& exception = header.exceptions[e];
        const int first = exception.group * tandem::kGroupInputs;
        for (int i = first; i < first + tandem::kGroupInputs && i < k; ++i) {
            const int offset = offset_in_group(i, lane);
            if (exception.offset != offset + 1) continue;
            const uint8_t low = groups[exception.group * tandem::kGroupBytes + tandem::kRowBytes + tandem::low_byte_place(offset)];
            out[i] = bf16_to_float((uint16_t)(exception.value << 8 | low));
        }
    }
}

inline void embed(const PackedMatrix& table, int token, float* out) {
    const uint8_t* panel = table.panel(token / tandem::kPanelOutputs);
    const int lane = token % tandem::kPanelOutputs;
    if (table.format == NumberFormat::kF32) {
        for (int i = 0; i < table.k; ++i) out[i] = ((const float*)(panel + i * tandem::kRowBytes))[lane];
    } else if (table.format == NumberFormat::kBf16) {
        embed_bf16(panel, lane, table.k, out);
    } else if (table.format == NumberFormat::kBf16Compressed) {
        const uint8_t* plain = ((const tandem::CompressedHeader*)panel)->plain;
        if (plain)
            embed_bf16(plain, lane, table.k, out);
        else
            embed_compressed(panel, lane, table.k, out);
    } else {
        const size_t step = tandem::block_bytes(table.format);
        for (int first = 0; first < table.k; first += tandem::kBlockInputs)
            embed_block(table.format, panel + first / tandem::kBlockInputs * step, lane, out + first);
    }
}

}  // namespace
