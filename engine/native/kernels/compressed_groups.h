// Groups of BF16_COMPRESSED (compressed_panel.h) become rows of BF16 again, 7 instructions for four rows.
#pragma once
#include "compressed_panel.h"
#include "kernels/vec.h"

namespace {

using tandem::CompressedHeader;
using tandem::HighByteException;
using tandem::kGroupBytes;
using tandem::kGroupInputs;
using tandem::kGroupRows;
using tandem::kPlainGroupBytes;

inline __attribute__((always_inline)) void decode_group(const uint8_t* group, I table, I (&rows)[kGroupRows]) {
    const I low_nibble = _mm512_set1_epi8(15), nibbles = iload(group);
    for (int half = 0; half < 2; ++half) {
        const I places = iand(half == 0 ? nibbles : _mm512_srli_epi16(nibbles, 4), low_nibble);
        const I high = _mm512_shuffle_epi8(table, places), low = iload(group + kRowBytes * (1 + half));
        rows[2 * half] = _mm512_unpacklo_epi8(low, high);
        rows[2 * half + 1] = _mm512_unpackhi_epi8(low, high);
    }
}

inline I load_table(const CompressedHeader& header) {
    return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)header.table));
}

// Neighbouring groups as BF16 in memory, without their exceptions.
inline __attribute__((always_inline)) void decode_groups(const uint8_t* from, int groups, I table, uint8_t* to) {
    for (int group = 0; group < groups; ++group, from += kGroupBytes, to += kPlainGroupBytes) {
        I rows[kGroupRows];
        decode_group(from, table, rows);
        for (int row = 0; row < kGroupRows; ++row) istore(to + row * kRowBytes, rows[row]);
    }
}

// Exceptions of the groups [first, first + groups), which stand in `plain`; returns the first one of a later group.
inline const HighByteException* put_exceptions(const HighByteException* at, const HighByteException* end, int first, int groups,
                                               uint8_t* plain) {
    for (; at < end && at->group < first + groups; ++at) plain[(at->group - first) * kPlainGroupBytes + at->offset] = at->value;
    return at;
}

// The group as BF16 in memory, with its exceptions in place; returns the first exception of a later group.
inline const HighByteException* decode_exceptional(const uint8_t* groups, int group, I table, uint8_t* plain,
                                                   const HighByteException* at, const HighByteException* end) {
    decode_groups(groups + group * kGroupBytes, 1, table, plain);
    return put_exceptions(at, end, group, 1, plain);
}

}  // namespace
