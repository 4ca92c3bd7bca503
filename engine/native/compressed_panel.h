// Lossless bfloat16 in 12 bits: how a panel of the format BF16_COMPRESSED lies in memory.
//
// The low byte of a bfloat16 (last exponent bit, mantissa) is kept as it is. The high byte (sign, seven exponent bits)
// takes few values in a trained matrix, so it is kept as a nibble: its place in the panel's table of the 16 most frequent
// ones, which one byte shuffle looks up. Weights with another high byte, about 1 in 20,000, stand in a list beside the
// panel and are put in their place when their group is decoded: products and sums are those of BF16, bit for bit.
//
//   header (64 bytes), then groups of 8 inputs = 4 rows of BF16 (256 bytes) as
//     64 bytes   nibbles: byte i has the one of low byte i in its low half, that of low byte 64 + i in the high one
//    128 bytes   low bytes, in the order in which interleaving with the high bytes gives rows 0, 1 and 2, 3
#pragma once
#include <cstddef>
#include <cstdint>

#include "packed_matrix.h"

namespace tandem {

constexpr int kGroupInputs = 8;
constexpr int kGroupRows = kGroupInputs / 2;
constexpr size_t kGroupBytes = 3 * kRowBytes;
constexpr size_t kPlainGroupBytes = kGroupRows * kRowBytes;
constexpr int kTableEntries = 16;

// A weight whose high byte is not in the table.
struct HighByteException {
    uint16_t group;
    uint8_t offset;  // of the high byte in the group's 4 rows of BF16
    uint8_t value;
};

struct alignas(kRowBytes) CompressedHeader {
    uint8_t table[kTableEntries];
    const HighByteException* exceptions;  // by group
    const uint8_t* plain;                 // not null: the panel as BF16, because too many weights were exceptions
    int32_t num_exceptions;
};
static_assert(sizeof(CompressedHeader) == kRowBytes, "groups start on a cache line");

// Where a group keeps the low byte of the weight at `offset` (even) of its 4 rows of BF16: 0 to 127.
static constexpr int low_byte_place(int offset) {
    const int row = offset / (int)kRowBytes, in_row = offset % (int)kRowBytes;
    // Interleaving takes the lower 8 bytes of each 16 for the even row, the upper 8 for the odd one.
    return row / 2 * 64 + in_row / 16 * 16 + row % 2 * 8 + in_row % 16 / 2;
}

}  // namespace tandem
