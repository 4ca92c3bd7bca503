// Linear layers with BF16 weights on AMX tiles. Rows are padded to 16; all row counts take this path, so that a row's
// result does not depend on the batch.
#pragma once
#include "kernels/dense_linear.h"
#include "kernels/tile_products.h"

namespace {

// Linear layers. Packed activations: [tile of 16 rows][32 inputs][16 rows][64 bytes].
struct TileLinear {
    static size_t packed_bytes(int rows, int k_padded) {
        return (size_t)whole_tiles(rows) * kTileRows * (size_t)k_padded * 2;
    }

    static void pack(const float* x, size_t stride, int rows, int k, int k_padded, void* packed) {
        uint8_t* to = (uint8_t*)packed;
        for (int first = 0; first < rows; first += kTileRows)
            for (int input = 0; input < k_padded; input += 32, to += kTileBytes)
                for (int m = 0; m < kTileRows; ++m) {
                    const int wanted = first + m < rows ? k - input : 0;
                    const int real = wanted < 0 ? 0 : (wanted < 32 ? wanted : 32);
                    round_row(x + (first + m) * stride + input, real, 32, (uint16_t*)(to + m * 64));
                }
    }

    static void multiply(const void* packed, int rows, const PackedMatrix& w, int first_panel, int last_panel,
                         float* out, size_t out_stride, bool add, void*) {
        [[maybe_unused]] const TileSession session;
        const int steps = w.k_padded / 32;
        const size_t row_tile_bytes = steps * kTileBytes;
        for (int p = first_panel; p < last_panel; p += 2) {
            const int panels = p + 1 < last_panel ? 2 : 1;
            for (int row = 0; row < rows; row += 2 * kTileRows) {
                const int left = rows - row < 2 * kTileRows ? rows - row : 2 * kTileRows;
                const TileRows a = {(const uint8_t*)packed + row / kTileRows * row_tile_bytes, 64, kTileBytes,
                                    row_tile_bytes};
                float* to = out + row * out_stride + (size_t)(p - first_panel) * kPanelOutputs;
                multiply_rows(a, left, w.panel(p), w.panel_bytes, panels, steps, to, out_stride, add, row == 0);
            }
        }
    }

    // Whole tiles go straight to `out`; others through a buffer, since `out` has no rows for the padding.
    static void multiply_rows(const TileRows& a, int rows, const uint8_t* w, size_t panel_stride, int panels, int steps,
                              float* out, size_t out_stride, bool add, bool stream) {
        if (!add && rows % kTileRows == 0)
            return multiply_tiles<false>(a, rows / kTileRows, w, panel_stride, panels, steps, out, out_stride, stream);
        alignas(64) float buffer[2 * kTileRows][2 * kPanelOutputs];
        multiply_tiles<false>(a, whole_tiles(rows), w, panel_stride, panels, steps, buffer[0], 2 * kPanelOutputs, stream);
        for (int m = 0; m < rows; ++m)
            for (int i = 0; i < panels * kPanelOutputs; i += kWidth) {
                float* to = out + m * out_stride + i;
                vstore(to, add ? vadd(vload(to), vload(buffer[m] + i)) : vload(buffer[m] + i));
            }
    }
};
}  // namespace
