// Activations of linear layers as AMX tiles: [tile of up to 16 rows][32 inputs][rows][64 bytes], rounded to BF16.
#pragma once
#include "compressed_panel.h"
#include "kernels/amx_tiles.h"
#include "kernels/dense_linear.h"

namespace {

constexpr int kTileInputs = 32;
constexpr int kTileGroups = kTileInputs / tandem::kGroupInputs;
constexpr int kBlockRows = 2 * kTileRows;  // of one product of four tiles
constexpr int kPairFloats = 2 * kPanelOutputs;

struct TileActivations {
    const uint8_t* data;
    int rows, steps;

    static size_t bytes(int rows, int k_padded) { return (size_t)rows * (size_t)k_padded * 2; }

    static int run_rows(int) { return kTileRows; }
    static void pack(const float* x, size_t stride, int first, int last, int, int k, int k_padded, void* packed) {
        uint8_t* to = (uint8_t*)packed + bytes(first, k_padded);
        for (; first < last; first += kTileRows) {
            const int count = first + kTileRows <= last ? kTileRows : last - first;
            const size_t step_bytes = count * kRowBytes;
            for (int m = 0; m < count; ++m, x += stride) {
                const float* from = x;
                uint8_t* line = to + m * kRowBytes;
                int input = 0;
                for (; input + kTileInputs <= k; input += kTileInputs, line += step_bytes)
                    vstore_bf16_pair((uint16_t*)line, vload(from + input), vload(from + input + kWidth));
                for (; input < k_padded; input += kTileInputs, line += step_bytes)
                    round_row(from + input, k - input, kTileInputs, (uint16_t*)line);
            }
            to += step_bytes * (size_t)(k_padded / kTileInputs);
        }
    }

    int count(int row) const { return row + kTileRows <= rows ? kTileRows : rows - row; }
    // Where the tile of rows from `row` (a multiple of 16) on begins, from `step` on.
    size_t offset(int row, int step) const { return ((size_t)row * steps + (size_t)step * count(row)) * kRowBytes; }
    const uint8_t* tile(int row, int step) const { return data + offset(row, step); }
};

}  // namespace
