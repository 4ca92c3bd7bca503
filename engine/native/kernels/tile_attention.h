// The two products of attention over bfloat16 KV on AMX tiles.
#pragma once
#include "kernels/attention_layout.h"
#include "kernels/dense_linear.h"
#include "kernels/tile_products.h"

namespace {

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
