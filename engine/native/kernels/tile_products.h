// BF16 products of whole AMX tiles, for linear layers (tile_linear.h) and attention (tile_attention.h).
//
// A tile of weights is 16 rows of a panel (32 inputs of 16 outputs), which is how packed_matrix.h has them. Two tiles of
// activations and two of weights make four products, so each tile is loaded for two.
#pragma once
#include "kernels/amx_tiles.h"

namespace {

constexpr int kTileColumns = 16;  // of sums
constexpr int kSumTiles = 4;

inline int whole_tiles(int rows) { return (rows + kTileRows - 1) / kTileRows; }

// Activations of up to two tiles of 16 rows: rows `row_stride` bytes apart, 32 inputs further `step` bytes on, the
// second tile of rows `tile` bytes on.
struct TileRows {
    const uint8_t* data;
    size_t row_stride, step, tile;
};

// Tiles of sums of RT tiles of rows and PT of weights. Tiles 0 and 1 are neighbours in memory: of a pair of panels, as 2 and 3
// are. `next_pair` floats on are those of the second tile of rows or, of one tile of rows, of the next two panels.
template <int RT, int PT>
constexpr bool has_sum(int tile) {
    static_assert(RT * PT <= kSumTiles, "every product has its tile of sums");
    return RT == 1 ? tile < PT : tile / 2 < RT && tile % 2 < PT;
}
template <int T>
inline __attribute__((always_inline)) float* place_of_sum(float* sums, size_t next_pair) {
    return sums + T / 2 * next_pair + T % 2 * kTileColumns;
}

// From memory, or from zero.
template <int RT, int PT, int T = 0>
inline __attribute__((always_inline)) void start_sums(float* sums, size_t next_pair, size_t stride, bool go_on) {
    if constexpr (has_sum<RT, PT>(T)) {
        if (go_on)
            tile_load<T>(place_of_sum<T>(sums, next_pair), stride * sizeof(float));
        else
            tile_zero<T>();
    }
    if constexpr (T + 1 < kSumTiles) start_sums<RT, PT, T + 1>(sums, next_pair, stride, go_on);
}
template <int RT, int PT, int T = 0>
inline __attribute__((always_inline)) void store_sums(float* sums, size_t next_pair, size_t stride) {
    if constexpr (has_sum<RT, PT>(T)) tile_store<T>(place_of_sum<T>(sums, next_pair), stride * sizeof(float));
    if constexpr (T + 1 < kSumTiles) store_sums<RT, PT, T + 1>(sums, next_pair, stride);
}

template <int RT, int PT>
inline void add_products() {
    tile_dot<0, 4, 6>();
    if constexpr (PT == 2) tile_dot<1, 4, 7>();
    if constexpr (RT == 2) tile_dot<2, 5, 6>();
    if constexpr (RT == 2 && PT == 2) tile_dot<3, 5, 7>();
}

// out[16 RT, 32] = a * two panels of `w`, on top of `out` with kContinue. Weights are keys or values of a tile of attention, 32 KB
// that are read once for each block of rows: they pass by the first cache, which the block's scores and sums need.
template <int RT, bool kContinue>
inline void multiply_tiles(const TileRows& a, const uint8_t* w, size_t panel_stride, int steps, float* out, size_t out_stride) {
    start_sums<RT, 2>(out, kTileRows * out_stride, out_stride, kContinue);
    for (int s = 0; s < steps; ++s) {
        const uint8_t *rows = a.data + s * a.step, *panel = w + s * kTileBytes;
        tile_load<4>(rows, a.row_stride);
        tile_load_passing<6>(panel, 64);
        tile_load_passing<7>(panel + panel_stride, 64);
        if constexpr (RT == 2) tile_load<5>(rows + a.tile, a.row_stride);
        add_products<RT, 2>();
    }
    store_sums<RT, 2>(out, kTileRows * out_stride, out_stride);
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
