// How a panel of bfloat16 weights becomes float16 on the way to products in half precision, settled when it is packed.
//
// A float16 has more bits of mantissa than a bfloat16 and five of exponent instead of eight. One power of two for each
// panel brings its largest weight to an exponent from which 21 binades below are whole: `bias` is taken from the
// exponent's field, what is then negative becomes zero. Which weights lose by that is known beforehand, so a matrix in
// which it matters is multiplied in float32 instead.
#pragma once
#include <cstddef>
#include <cstdint>

#include "packed_matrix.h"

namespace tandem {

// Field of the largest weight's exponent as float16: this or one below, because `bias` is even. Below 2^8, then; sums
// of a chunk's 64 products with activations below 1 stay below 2^14, a quarter of what a float16 holds.
constexpr int kHalfTopExponent = 22;
constexpr int kBf16MantissaBits = 7;
constexpr int kTableEntriesOfHalf = 16;

struct HalfPanel {
    // Of BF16_COMPRESSED: for each of its table's high bytes (sign, exponent's upper seven bits) the same of a float16,
    // as 000seeee; with the low byte below it and three bits further up, that is the float16.
    uint8_t table[kTableEntriesOfHalf] = {};
    float exponent = 0.0f;  // products are to be multiplied by 2^exponent
    uint16_t bias = 0;      // even
    bool fits = true;
};

// `plain`: the panel as BF16.
HalfPanel half_panel(const uint8_t* plain, int k_padded);

// Notes what holds of one panel of a matrix, instead of what was noted before.
void set_half_panel(PackedMatrix& matrix, int panel, const HalfPanel& half);

// Whether the byte lookup cannot make the float16 of all weights that have this high byte: they would not be zero.
bool half_needs_exception(const HalfPanel& half, const uint8_t* plain, int k_padded, uint8_t high_byte);

// The table for high bytes of a compressed panel.
void fill_half_table(HalfPanel& half, const uint8_t* high_bytes);

}  // namespace tandem
