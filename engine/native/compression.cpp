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
constexpr int kNotInTable = -1;

// The most frequent high bytes of a panel, and each byte's place among them.
struct HighByteTable {
    uint8_t bytes[kTableEntries];
    int places[256];

    HighByteTable(const uint8_t* plain, size_t num_bytes) {
        size_t counts[256] = {};
        for (size_t i = 1; i < num_bytes; i += 2) ++counts[plain[i]];
        int order[256];
        std::iota(order, order + 256, 0);
        std::partial_sort(order, order + kTableEntries, order + 256, [&](int a, int b) {
            return counts[a] != counts[b] ? counts[a] > counts[b] : a < b;
        });
        std::fill(places, places + 256, kNotInTable);
        for (int i = 0; i < kTableEntries; ++i) {
            bytes[i] = (uint8_t)order[i];
            places[order[i]] = i;
        }
    }

    // Weights with such a high byte become exceptions.
    template <class Predicate>
    void leave_out(const Predicate& predicate) {
        for (uint8_t byte : bytes)
            if (predicate(byte)) places[byte] = kNotInTable;
    }
};

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
        std::memset(to, 0, kRowBytes);
        for (int weight = 0; weight < kGroupWeights; ++weight) {
            const int place = low_byte_place(2 * weight), entry = table.places[plain[2 * weight + 1]];
            to[kRowBytes + (size_t)place] = plain[2 * weight];
            if (entry == kNotInTable)
                exceptions_.push_back({(uint16_t)group, (uint8_t)(2 * weight + 1), plain[2 * weight + 1]});
            else
                to[place % 64] |= (uint8_t)(entry << (place / 64 * 4));
        }
    }
    header.num_exceptions = (int32_t)(exceptions_.size() - before);
    if (header.num_exceptions * kLeastGroupsPerException > groups) {
        exceptions_.resize(before);
        keep_plain(header, plain - (size_t)groups * kPlainGroupBytes);
    } else if (header.num_exceptions > 0) {
        with_exceptions_.push_back(&header);
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
