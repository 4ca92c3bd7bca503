// BF16 products on AMX tiles: linear layers and the two products of attention.
//
// A tile of weights is 16 rows of a panel (32 inputs of 16 outputs), which is how packed_matrix.h has them. Two tiles of
// activations and two of weights make four products, so each tile is loaded for two. Rows are padded to 16. All row
// counts take this path: a row's result does not depend on the batch.
#pragma once
#include "kernels/amx_tiles.h"
#include "kernels/attention_layout.h"
#include "kernels/dense_linear.h"

namespace {

constexpr size_t kTileWeightsAhead = 4096;  // bytes of a panel that are fetched before their tile is loaded

inline int whole_tiles(int rows) { return (rows + kTileRows - 1) / kTileRows; }

// Activations of up to two tiles of 16 rows: rows `row_stride` bytes apart, 32 inputs further `step` bytes on, the
// second tile of rows `tile` bytes on.
struct TileRows {
    const uint8_t* data;
    size_t row_stride, step, tile;
};

// out[16 RT, 16 PT] = a * w, on top of `out` with kContinue.
template <int RT, int PT, bool kContinue>
inline void multiply_tiles(const TileRows& a, const uint8_t* w, size_t panel_stride, int steps, float* out,
                           size_t out_stride, bool stream) {
    const size_t stride = out_stride * 4;
    if constexpr (kContinue) {
        tile_load<0>(out, stride);
        if constexpr (PT == 2) tile_load<1>(out + 16, stride);
        if constexpr (RT == 2) tile_load<2>(out + 16 * out_stride, stride);
        if constexpr (RT == 2 && PT == 2) tile_load<3>(out + 16 * out_stride + 16, stride);
    } else {
        tile_zero<0>();
        tile_zero<1>();
        tile_zero<2>();
        tile_zero<3>();
    }
    for (int s = 0; s < steps; ++s) {
        const uint8_t *rows = a.data + s * a.step, *panel = w + s * kTileBytes;
        if (stream)
            for (int p = 0; p < PT; ++p)
                for (size_t byte = 0; byte < kTileBytes; byte += 64)
                    __builtin_prefetch(panel + p * panel_stride + kTileWeightsAhead + byte, 0, 3);
        tile_load<4>(rows, a.row_stride);
        tile_load<6>(panel, 64);
        tile_dot<0, 4, 6>();
        if constexpr (PT == 2) {
            tile_load<7>(panel + panel_stride, 64);
            tile_dot<1, 4, 7>();
        }
        if constexpr (RT == 2) {
            tile_load<5>(rows + a.tile, a.row_stride);
            tile_dot<2, 5, 6>();
            if constexpr (PT == 2) tile_dot<3, 5, 7>();
        }
    }
    tile_store<0>(out, stride);
    if constexpr (PT == 2) tile_store<1>(out + 16, stride);
    if constexpr (RT == 2) tile_store<2>(out + 16 * out_stride, stride);
    if constexpr (RT == 2 && PT == 2) tile_store<3>(out + 16 * out_stride + 16, stride);
}

template <bool kContinue>
inline void multiply_tiles(const TileRows& a, int row_tiles, const uint8_t* w, size_t panel_stride, int panels, int steps,
                           float* out, size_t out_stride, bool stream) {
    if (row_tiles == 2 && panels == 2)
        multiply_tiles<2, 2, kContinue>(a, w, panel_stride, steps, out, out_stride, stream);
    else if (row_tiles == 2)
        multiply_tiles<2, 1, kContinue>(a, w, panel_stride, steps, out, out_stride, stream);
    else if (panels == 2)
        multiply_tiles<1, 2, kContinue>(a, w, panel_stride, steps, out, out_stride, stream);
    else
        multiply_tiles<1, 1, kContinue>(a, w, panel_stride, steps, out, out_stride, stream);
}

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

// The products of attention (see RegisterProducts). Queries and weights are rows of bfloat16.
struct TileProducts {
    using Activation = uint32_t;
    using Session = TileSession;
    static constexpr int kInputs = 2;
    static constexpr int kBlockRows = 2 * kTileRows;

    static RowBlocks blocks(int rows) { return RowBlocks::of_size(rows, kBlockRows); }
    static int state_rows(int rows) { return whole_tiles(rows) * kTileRows; }

    static void pack_queries(const float* x, int rows, int head_dim, Activation* q) {
        for (int row = 0; row < state_rows(rows); ++row)
            round_row(x + (size_t)row * head_dim, row < rows ? head_dim : 0, head_dim,
                      (uint16_t*)q + (size_t)row * head_dim);
    }
    static void scores(const Activation* q, int rows, const uint8_t* keys, int head_dim, int num_keys, float* out) {
        const size_t row_bytes = (size_t)head_dim * 2, panel_stride = (size_t)head_dim / 2 * kRowBytes;
        const TileRows a = {(const uint8_t*)q, row_bytes, 64, kTileRows * row_bytes};
        for (int key = 0; key < num_keys; key += 32)
            multiply_tiles<false>(a, whole_tiles(rows), keys + key / 16 * panel_stride, panel_stride, 2, head_dim / 32,
                                  out + key, kTileKeys, false);
    }
    static void weigh(const Activation* p, int rows, const uint8_t* values, int head_dim, int num_keys, float* out) {
        const size_t row_bytes = kTileKeys * 2, panel_stride = kTileKeys / 2 * kRowBytes;
        const TileRows a = {(const uint8_t*)p, row_bytes, 64, kTileRows * row_bytes};
        for (int dim = 0; dim < head_dim; dim += 32)
            multiply_tiles<true>(a, whole_tiles(rows), values + dim / 16 * panel_stride, panel_stride, 2, num_keys / 32,
                                 out + dim, head_dim, false);
    }
};

}  // namespace
