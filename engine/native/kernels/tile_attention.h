// The two products of attention over bfloat16 KV on AMX tiles.
#pragma once
#include "kernels/attention_layout.h"
#include "kernels/dense_linear.h"
#include "kernels/tile_products.h"

namespace {

constexpr int kFewTileRows = kTileRows;  // of tasks that need no arranged keys
constexpr int kShortTiles = 5;           // that have as many rows as such a task: sums and weights
constexpr int kQueryTile = 6, kScoreTile = 7;  // that have a column for each row of such a task, by fours

inline int score_columns(int rows) { return (rows + 3) / 4 * 4; }

inline TileConfiguration few_rows_configuration(int rows) {
    TileConfiguration configuration(kShortTiles, rows);
    configuration.set_columns(kQueryTile, score_columns(rows));
    configuration.set_columns(kScoreTile, score_columns(rows));
    return configuration;
}

// Up to 16 rows of queries in the order of weights: [pair of dims][16 rows], zeros for rows that are not there.
inline void turn_queries(const float* x, int rows, int head_dim, uint32_t* q) {
    alignas(64) uint16_t rounded[kTileRows][kMaxHeadDim];
    const uint8_t* from[kTileRows];
    for (int row = 0; row < kTileRows; ++row) {
        from[row] = row < rows ? (const uint8_t*)rounded[row] : kZeroRow;
        if (row < rows) round_row(x + (size_t)row * head_dim, head_dim, head_dim, rounded[row]);
    }
    for (int pair = 0; pair < head_dim / 2; pair += kTileRows) transpose_16x16(from, pair, q + (size_t)pair * kTileRows);
}

// The products of attention (see RegisterProducts). Queries and weights are rows of bfloat16.
struct TileProducts {
    using Activation = uint32_t;
    using Session = TileSession;
    static constexpr int kInputs = 2;
    static constexpr int kBlockRows = 2 * kTileRows;

    static Session session(int rows) {
        return rows <= kFewTileRows ? Session(few_rows_configuration(rows)) : Session();
    }
    static RowBlocks blocks(int rows) { return RowBlocks::of_size(rows, kBlockRows); }
    static int state_rows(int rows) { return whole_tiles(rows) * kTileRows; }
    static int summed_rows(int rows) { return rows <= kFewTileRows ? rows : state_rows(rows); }

    static void pack_queries(const float* x, int rows, int head_dim, Activation* q) {
        if (rows <= kFewTileRows) return turn_queries(x, rows, head_dim, q);
        for (int row = 0; row < state_rows(rows); ++row)
            round_row(x + (size_t)row * head_dim, row < rows ? head_dim : 0, head_dim, (uint16_t*)q + (size_t)row * head_dim);
    }
    static void scores(const Activation* q, int rows, const uint8_t* keys, int head_dim, int num_keys, float* out) {
        const size_t row_bytes = (size_t)head_dim * 2, panel_stride = (size_t)head_dim / 2 * kRowBytes;
        const TileRows a = {(const uint8_t*)q, row_bytes, 64, kTileRows * row_bytes};
        for (int key = 0; key < num_keys; key += 32)
            multiply_tiles<false>(a, whole_tiles(rows), keys + key / 16 * panel_stride, panel_stride, head_dim / 32,
                                  out + key, kTileKeys);
    }
    static void weigh(const Activation* p, int rows, const uint8_t* values, int head_dim, int num_keys, float* out) {
        const size_t row_bytes = kTileKeys * 2, panel_stride = kTileKeys / 2 * kRowBytes;
        const TileRows a = {(const uint8_t*)p, row_bytes, 64, kTileRows * row_bytes};
        for (int dim = 0; dim < head_dim; dim += 32)
            multiply_tiles<true>(a, whole_tiles(rows), values + dim / 16 * panel_stride, panel_stride, num_keys / 32,
                                 out + dim, head_dim);
    }
};

// Values of two keys, pair by pair, as rows of tiles of 16 dims, `tile` bytes apart. Of 32 dims, four go to one tile and
// four to the next in turns.
template <int kDimTiles>
inline void interleave_pair(const uint8_t* even, const uint8_t* odd, uint8_t* out, size_t tile) {
#pragma GCC unroll 4
    for (int i = 0; i < kDimTiles; i += 2) {
        const I first = iload(even + i * 32), second = iload(odd + i * 32);
        istore(out + i * tile, _mm512_unpacklo_epi16(first, second));
        istore(out + (i + 1) * tile, _mm512_unpackhi_epi16(first, second));
    }
}

template <>
struct Traits<TileProducts> {
    static constexpr bool kScalesQueries = false;
    static constexpr bool kBf16Values = true;
    static constexpr float kValueScale = 1.0f;
    static void store_weights(uint32_t* p, int key, const F (&weights)[2]) {
        vstore_bf16_pair((uint16_t*)p + key, weights[0], weights[1]);
    }
    // A larger maximum corrects all that was summed, and any number near it serves as well: bfloat16 and floats lose nothing
    // on weights of up to 2^8. So it is seldom raised after a row's first tile.
    static F raise(F maximum, F of_tile) {
        const __mmask16 is_far = _mm512_cmp_ps_mask(of_tile, vadd(maximum, vset1(8.0f)), _CMP_GT_OQ);
        return _mm512_mask_mov_ps(maximum, is_far, of_tile);
    }
    // From the order of interleaved values.
    static void restore_dims(float* out, int head_dim) {
        const I first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23), second = iadd(first, iset1(8));
        for (int dim = 0; dim < head_dim; dim += 32) {
            const F low = vload(out + dim), high = vload(out + dim + 16);
            vstore(out + dim, _mm512_permutex2var_ps(low, first, high));
            vstore(out + dim + 16, _mm512_permutex2var_ps(low, second, high));
        }
    }
};

// None of these tiles holds anything that is needed between products.
template <>
inline void between_products<TileProducts>() {
    tiles_stay_awake<0, 4, 5>();
}

template <>
struct Arrangement<TileProducts> {
    static constexpr bool kWidens = false;

    static void keys(const uint8_t* const* rows, int head_dim, int key, uint8_t* tile) {
        arrange_keys(rows, head_dim / 2, tile + (size_t)key / kPanelOutputs * (head_dim / 2) * kRowBytes);
    }
    static void values(const uint8_t* const* rows, int head_dim, int key, uint8_t* tile) {
        constexpr size_t kPanelBytes = kTileKeys / 2 * kRowBytes;
        for (int i = 0; i < kPanelOutputs; i += 2)
            for (int dim = 0; dim < head_dim; dim += 32)
                interleave_pair<2>(rows[i] + dim * 2, rows[i + 1] + dim * 2, tile + dim / 16 * kPanelBytes + (key + i) / 2 * kRowBytes,
                                   kPanelBytes);
    }
};

}  // namespace
