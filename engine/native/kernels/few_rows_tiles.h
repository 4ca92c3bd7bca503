// Few rows of queries against keys and values as they lie in the pool, on AMX tiles.
//
//   scores^T [16 keys][rows] = K Q^T    keys are the product's rows, so nothing is transposed but queries, once a task
//   O [rows][dims] += P V               values are interleaved by pairs of keys, 32 keys at a time
//
// Sums are those of arranged tiles, term by term: a product does not care which of its factors is the row.
//
//   tiles 0 to 3  sums of values, as many rows as there are queries
//         4       weights, as many rows
//         5, 6, 7 keys, queries, scores, then 6 and 7 values: 16 rows
#pragma once
#include "kernels/attention_softmax.h"
#include "kernels/few_rows_path.h"
#include "kernels/tile_attention.h"
#include "kernels/tile_places.h"

namespace {

// scores[4 rows][kTileKeys], 16 keys of them, from scores^T [16 keys][16 rows].
inline void turn_scores(const float* turned, float* scores) {
    F quads[4];  // [128-bit lane of 4 keys][4 rows]: the lanes' first, second, third and fourth keys
    for (int i = 0; i < 4; ++i) {
        quads[i] = _mm512_castps128_ps512(_mm_loadu_ps(turned + i * kTileRows));
        quads[i] = _mm512_mask_broadcast_f32x4(quads[i], 0x00f0, _mm_loadu_ps(turned + (4 + i) * kTileRows));
        quads[i] = _mm512_mask_broadcast_f32x4(quads[i], 0x0f00, _mm_loadu_ps(turned + (8 + i) * kTileRows));
        quads[i] = _mm512_mask_broadcast_f32x4(quads[i], 0xf000, _mm_loadu_ps(turned + (12 + i) * kTileRows));
    }
    const F low01 = _mm512_unpacklo_ps(quads[0], quads[1]), high01 = _mm512_unpackhi_ps(quads[0], quads[1]);
    const F low23 = _mm512_unpacklo_ps(quads[2], quads[3]), high23 = _mm512_unpackhi_ps(quads[2], quads[3]);
    vstore(scores, _mm512_shuffle_ps(low01, low23, 0x44));
    vstore(scores + kTileKeys, _mm512_shuffle_ps(low01, low23, 0xee));
    vstore(scores + 2 * kTileKeys, _mm512_shuffle_ps(high01, high23, 0x44));
    vstore(scores + 3 * kTileKeys, _mm512_shuffle_ps(high01, high23, 0xee));
}

template <>
struct FewRowsPath<TileProducts> {
    using TaskScratch = Scratch<TileProducts>;
    static bool takes(int rows) { return rows <= kFewTileRows; }

    static void attend_tiles(const AttentionTask& task, const AttentionTask* next, const TaskScratch& s, int rows) {
        const int end_key = task.first_position + task.num_queries, first = first_tile(task);
        TilePlaces tile(task, first, end_key);
        for (int key = first; key < end_key; key += kTileKeys) {
            const TilePlaces ahead = TilePlaces::after(task, next, key, end_key);
            attend_tile(task, s, tile, ahead, key, keys_of_tile(key, end_key), rows);
            tile = ahead;
        }
    }

  private:
    // All rows of all KV heads. The scratch of arranged keys holds scores^T.
    static void attend_tile(const AttentionTask& task, const TaskScratch& s, const TilePlaces& tile, const TilePlaces& ahead, int key,
                            int num_keys, int rows) {
        const int head_dim = task.kv.head_dim;
        TileFetch fetch(ahead, num_keys);
        for (int head = 0; head < task.num_kv_heads; ++head) {
            const TaskScratch of_head = s.head(head, rows, head_dim);
            const size_t distance = head * tile.head_bytes;
            score(of_head, tile, distance, rows, head_dim, num_keys, fetch);
            fetch.turns(num_keys / 32 * tile.lines_of_row());
            softmax_block(task, of_head, {0, rows, key, num_keys});
            for (int dim = 0; dim < head_dim; dim += 64)
                (head_dim - dim >= 64 ? &weigh<4> : &weigh<2>)((const uint8_t*)s.p, tile, tile.value_bytes + distance + dim * 2, num_keys,
                                                               of_head.out + dim, head_dim, fetch);
        }
    }
    static void score(const TaskScratch& s, const TilePlaces& tile, size_t distance, int rows, int head_dim, int num_keys,
                      TileFetch& fetch) {
        float* turned = (float*)s.keys;
        uint8_t *first_copy = (uint8_t*)s.widened, *second_copy = first_copy + kPanelOutputs * tile.row_bytes;
        for (int key = 0; key < num_keys; key += 2 * kPanelOutputs) {
            const PanelPlace* panel = tile.panel + key / kPanelOutputs;
            const uint8_t *first = panel[0].run(distance, head_dim, first_copy), *second = panel[1].run(distance, head_dim, second_copy);
            score_panel(first, tile.row_bytes, (const uint8_t*)s.q, turned + key * kTileRows, fetch);
            score_panel(second, tile.row_bytes, (const uint8_t*)s.q, turned + (key + kPanelOutputs) * kTileRows, fetch);
        }
        fetch.turns(num_keys / 64 * tile.lines_of_row());
        for (int row = 0; row < rows; row += 4)
            for (int key = 0; key < num_keys; key += kPanelOutputs)
                turn_scores(turned + key * kTileRows + row, s.scores + row * kTileKeys + key);
    }
    // scores^T [16 keys][16 rows]
    static inline __attribute__((always_inline)) void score_panel(const uint8_t* keys, size_t row_bytes, const uint8_t* q, float* out,
                                                                  TileFetch& fetch) {
        tile_zero<7>();
        for (size_t byte = 0; byte < row_bytes; byte += 64, q += kTileBytes) {
            tile_load<6>(q, 64);
            tile_load<5>(keys + byte, row_bytes);
            tile_dot<7, 5, 6>();
            fetch.turns(1);
        }
        tile_store<7>(out, 64);
    }
    // O += P V of `kDimTiles` tiles of dims. While 32 keys are multiplied the next ones are interleaved: a tile that was just
    // written waits until its lines have reached the cache.
    template <int kDimTiles>
    static void weigh(const uint8_t* p, const TilePlaces& tile, size_t distance, int num_keys, float* out, int head_dim, TileFetch& fetch) {
        alignas(64) uint8_t values[2][kDimTiles * kTileBytes];
        load_sums<kDimTiles>(out, head_dim);
        interleave<kDimTiles>(tile.panel, distance, values[0], fetch);
        for (int key = 0; key < num_keys; key += 32) {
            const int turn = key / 32 % 2;
            if (key + 32 < num_keys)
                interleave<kDimTiles>(tile.panel + (key + 32) / kPanelOutputs, distance, values[1 - turn], fetch);
            multiply<kDimTiles>(p + key * 2, values[turn]);
        }
        fetch.turns(num_keys / 32);
        store_sums<kDimTiles>(out, head_dim);
    }
    // [tile of dims][key pair][16 dims][2] of 32 keys
    template <int kDimTiles>
    static void interleave(const PanelPlace* panels, size_t distance, uint8_t* out, TileFetch& fetch) {
        for (int panel = 0; panel < 2; ++panel) {
            const uint8_t* rows[kPanelOutputs];
            panels[panel].rows.at(distance, rows);
            for (int key = 0; key < kPanelOutputs; key += 2, out += kRowBytes) {
                interleave_pair<kDimTiles>(rows[key], rows[key + 1], out, kTileBytes);
                if (key % 4 == 0) fetch.turns(1);
            }
        }
    }
    template <int kDimTiles>
    static void multiply(const uint8_t* p, const uint8_t* values) {
        tile_load<4>(p, kTileKeys * 2);
        tile_load<6>(values, 64);
        tile_dot<0, 4, 6>();
        tile_load<7>(values + kTileBytes, 64);
        tile_dot<1, 4, 7>();
        if constexpr (kDimTiles == 4) {
            tile_load<6>(values + 2 * kTileBytes, 64);
            tile_dot<2, 4, 6>();
            tile_load<7>(values + 3 * kTileBytes, 64);
            tile_dot<3, 4, 7>();
        }
    }
    template <int kDimTiles>
    static void load_sums(const float* out, int head_dim) {
        const size_t stride = (size_t)head_dim * 4;
        tile_load<0>(out, stride);
        tile_load<1>(out + 16, stride);
        if constexpr (kDimTiles == 4) {
            tile_load<2>(out + 32, stride);
            tile_load<3>(out + 48, stride);
        }
    }
    template <int kDimTiles>
    static void store_sums(float* out, int head_dim) {
        const size_t stride = (size_t)head_dim * 4;
        tile_store<0>(out, stride);
        tile_store<1>(out + 16, stride);
        if constexpr (kDimTiles == 4) {
            tile_store<2>(out + 32, stride);
            tile_store<3>(out + 48, stride);
        }
    }
};

}  // namespace
