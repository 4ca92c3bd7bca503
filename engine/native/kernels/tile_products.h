// BF16 products of whole AMX tiles, for linear layers (tile_linear.h) and attention (tile_attention.h).
//
// A tile of weights is 16 rows of a panel (32 inputs of 16 outputs), which is how packed_matrix.h has them. Two tiles of
// activations and two of weights make four products, so each tile is loaded for two.
#pragma once
#include "kernels/amx_tiles.h"

namespace {

inline int whole_tiles(int rows) { return (rows + kTileRows - 1) / kTileRows; }

// Activations of up to two tiles of 16 rows: rows `row_stride` bytes apart, 32 inputs further `step` bytes on, the
// second tile of rows `tile` bytes on.
struct TileRows {
    const uint8_t* data;
    size_t row_stride, step, tile;
};

// The sums of RT tiles of rows and PT of weights start from `out` or from zero.
template <int RT, int PT>
inline void start_sums(const float* out, size_t out_stride, bool go_on) {
    const size_t stride = out_stride * sizeof(float);
    if (go_on) {
        tile_load<0>(out, stride);
        if constexpr (PT == 2) tile_load<1>(out + 16, stride);
        if constexpr (RT == 2) tile_load<2>(out + 16 * out_stride, stride);
        if constexpr (RT == 2 && PT == 2) tile_load<3>(out + 16 * out_stride + 16, stride);
    } else {
        tile_zero<0>();
        if constexpr (PT == 2) tile_zero<1>();
        if constexpr (RT == 2) tile_zero<2>();
        if constexpr (RT == 2 && PT == 2) tile_zero<3>();
    }
}

template <int RT, int PT>
inline void add_products() {
    tile_dot<0, 4, 6>();
    if constexpr (PT == 2) tile_dot<1, 4, 7>();
    if constexpr (RT == 2) tile_dot<2, 5, 6>();
    if constexpr (RT == 2 && PT == 2) tile_dot<3, 5, 7>();
}

template <int RT, int PT>
inline void store_sums(float* out, size_t out_stride) {
    const size_t stride = out_stride * sizeof(float);
    tile_store<0>(out, stride);
    if constexpr (PT == 2) tile_store<1>(out + 16, stride);
    if constexpr (RT == 2) tile_store<2>(out + 16 * out_stride, stride);
    if constexpr (RT == 2 && PT == 2) tile_store<3>(out + 16 * out_stride + 16, stride);
}

// out[16 RT, 32] = a * two panels of `w`, on top of `out` with kContinue.
template <int RT, bool kContinue>
inline void multiply_tiles(const TileRows& a, const uint8_t* w, size_t panel_stride, int steps, float* out, size_t out_stride) {
    start_sums<RT, 2>(out, out_stride, kContinue);
    for (int s = 0; s < steps; ++s) {
        const uint8_t *rows = a.data + s * a.step, *panel = w + s * kTileBytes;
        tile_load<4>(rows, a.row_stride);
        tile_load<6>(panel, 64);
        tile_load<7>(panel + panel_stride, 64);
        if constexpr (RT == 2) tile_load<5>(rows + a.tile, a.row_stride);
        add_products<RT, 2>();
    }
    store_sums<RT, 2>(out, out_stride);
}

template <bool kContinue>
inline void multiply_tiles(const TileRows& a, int row_tiles, const uint8_t* w, size_t panel_stride, int steps, float* out,
                           size_t out_stride) {
    if (row_tiles == 2)
        multiply_tiles<2, kContinue>(a, w, panel_stride, steps, out, out_stride);
    else
        multiply_tiles<1, kContinue>(a, w, panel_stride, steps, out, out_stride);
}

}  // namespace
