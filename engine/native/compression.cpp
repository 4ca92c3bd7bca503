#include "compression.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "half_panel.h"

namespace tandem {

namespace {

constexpr int kGroupWeights = kGroupInputs * kPanelOutputs;
// A group with an exception takes about four times the time of one without. With one exception in eight groups, a panel
// is no faster than its plain form.
constexpr int kLeastGroupsPerException = 8;
constexpr uint8_t kNotInTable = 0x80;  // a bit that no place has

// The most frequent high bytes of a panel, and each byte's place among them.
struct HighByteTable {
    uint8_t bytes[kTableEntries];
    uint8_t places[256];

    HighByteTable(const uint8_t* plain, size_t num_bytes) {
        // Neighbours are often equal: counted in one place, each would wait for the one before.
        uint32_t counts[256] = {}, others[3][256] = {};
        for (size_t i = 1; i < num_bytes; i += 8) {
            ++counts[plain[i]];
            for (size_t j = 0; j < 3; ++j) ++others[j][plain[i + 2 * (j + 1)]];
        }
        for (int i = 0; i < 256; ++i) counts[i] += others[0][i] + others[1][i] + others[2][i];
        int order[256];
        std::iota(order, order + 256, 0);
        std::partial_sort(order, order + kTableEntries, order + 256, [&](int a, int b) {
            return counts[a] != counts[b] ? counts[a] > counts[b] : a < b;
        });
        std::fill(places, places + 256, kNotInTable);
        for (int i = 0; i < kTableEntries; ++i) {
            bytes[i] = (uint8_t)order[i];
            places[order[i]] = (uint8_t)i;
        }
    }

    // Weights with such a high byte become exceptions.
    template <class Predicate>
    void leave_out(const Predicate& predicate) {
        for (uint8_t byte : bytes)
            if (predicate(byte)) places[byte] = kNotInTable;
    }
};

// The weights' places in the table, in the order of their low bytes, which are copied; all places' bits.
uint8_t split_group(const uint8_t* plain, const HighByteTable& table, uint8_t* places, uint8_t* low_bytes) {
    uint8_t all = 0;
    for (int part = 0; part < kGroupWeights / 8; ++part) {
        // Eight weights of a row stay together (`low_byte_place`).
        const int place = part * 8, row = place / 64 * 2 + place / 8 % 2, in_row = place % 64 / 16 * 16;
        const uint8_t* from = plain + row * (int)kRowBytes + in_row;
        for (int i = 0; i < 8; ++i) {
            low_bytes[place + i] = from[2 * i];
            all |= places[place + i] = table.places[from[2 * i + 1]];
        }
    }
    return all;
}

}  // namespace

PanelCompressor::PanelCompressor(Arena& arena, PackedMatrix& matrix) : arena_(arena), matrix_(matrix) {
    if (matrix.k_padded / kGroupInputs > std::numeric_limits<uint16_t>::max())
        throw std::invalid_argument("a compressed matrix has at most 524,280 inputs, not " + std::to_string(matrix.k));
}

void PanelCompressor::compress(int panel, const uint8_t* plain) {
    const int groups = matrix_.k_padded / kGroupInputs;
    HighByteTable table(plain, (size_t)groups * kPlainGroupBytes);
    if (matrix_.half) {
        HalfPanel half = half_panel(plain, matrix_.k_padded);
        table.leave_out([&](uint8_t byte) { return half_needs_exception(half, plain, matrix_.k_padded, byte); });
        fill_half_table(half, table.bytes);
        set_half_panel(matrix_, panel, half);
    }
    uint8_t* to = matrix_.panel(panel);
    CompressedHeader& header = *(CompressedHeader*)to;
    header = {};
    std::memcpy(header.table, table.bytes, kTableEntries);
    const size_t before = exceptions_.size();
    to += sizeof(CompressedHeader);
    for (int group = 0; group < groups; ++group, to += kGroupBytes, plain += kPlainGroupBytes) {
        uint8_t places[kGroupWeights];
        if (split_group(plain, table, places, to + kRowBytes) & kNotInTable) take_exceptions(group, plain, places);
        for (size_t i = 0; i < kRowBytes; ++i) to[i] = (uint8_t)(places[i] | places[kRowBytes + i] << 4);
    }
    header.num_exceptions = (int32_t)(exceptions_.size() - before);
    if (header.num_exceptions * kLeastGroupsPerException > groups) {
        exceptions_.resize(before);
        keep_plain(header, plain - (size_t)groups * kPlainGroupBytes);
    } else if (header.num_exceptions > 0) {
        with_exceptions_.push_back(&header);
    }
}

// Weights whose high byte is not in the table; their places become 0, where any would do.
void PanelCompressor::take_exceptions(int group, const uint8_t* plain, uint8_t* places) {
    for (int offset = 0; offset < (int)kPlainGroupBytes; offset += 2) {
        uint8_t& place = places[low_byte_place(offset)];
        if (place != kNotInTable) continue;
        exceptions_.push_back({(uint16_t)group, (uint8_t)(offset + 1), plain[offset + 1]});
        place = 0;
    }
}

void PanelCompressor::keep_plain(CompressedHeader& header, const uint8_t* plain) {
    const size_t num_bytes = panel_bytes(NumberFormat::kBf16, matrix_.k_padded);
    uint8_t* kept = arena_.take(num_bytes);
    std::memcpy(kept, plain, num_bytes);
    header.plain = kept;
    header.num_exceptions = 0;
    ++matrix_.plain_panels;
}

void PanelCompressor::finish() {
    if (exceptions_.empty()) return;
    const size_t num_bytes = exceptions_.size() * sizeof(HighByteException);
    auto* kept = (HighByteException*)arena_.take(num_bytes);
    std::memcpy(kept, exceptions_.data(), num_bytes);
    matrix_.exceptions += (int64_t)exceptions_.size();
    for (CompressedHeader* header : with_exceptions_) {
        header->exceptions = kept;
        kept += header->num_exceptions;
    }
    exceptions_.clear();
    with_exceptions_.clear();
}

}  // namespace tandem
