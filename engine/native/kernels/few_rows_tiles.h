// Few rows of queries against keys and values as they lie in the pool, on AMX tiles.
//
//   scores^T [16 keys][rows] = K Q^T    keys are the product's rows, so nothing is transposed but queries, once a task
//   O [rows][dims] += P V               values are interleaved by pairs of keys, 32 keys at a time
//
// Sums are those of arranged tiles, term by term: a product does not care which of its factors is the row.
//
//   tiles 0 to 3  sums of values, as many rows as there are queries
//         4       weights, as many rows
//         5       keys, then values, 16 rows
//         6, 7    queries and scores, 16 rows with a column for each query
#pragma once
#include "kernels/attention_softmax.h"
#include "kernels/few_rows_path.h"
#include "kernels/tile_attention.h"
#include "kernels/tile_places.h"

namespace {

// Four keys' scores of four rows, a row of scores^T behind the other.
inline F load_quad(const float* turned, int columns) {
    if (columns == 4) return vload(turned);
    F quad = _mm512_castps128_ps512(_mm_loadu_ps(turned));
    quad = _mm512_mask_broadcast_f32x4(quad, 0x00f0, _mm_loadu_ps(turned + columns));
    quad = _mm512_mask_broadcast_f32x4(quad, 0x0f00, _mm_loadu_ps(turned + 2 * columns));
    return _mm512_mask_broadcast_f32x4(quad, 0xf000, _mm_loadu_ps(turned + 3 * columns));
}

// scores[4 rows][kTileKeys], 16 keys of them, from scores^T [16 keys][columns].
inline void turn_scores(const float* turned, int columns, float* scores) {
    const I rows01 = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29), rows23 = iadd(rows01, iset1(2));
    F quads[4];
    for (int i = 0; i < 4; ++i) quads[i] = load_quad(turned + 4 * i * columns, columns);
    const F low01 = _mm512_permutex2var_ps(quads[0], rows01, quads[1]), high01 = _mm512_permutex2var_ps(quads[2], rows01, quads[3]);
    const F low23 = _mm512_permutex2var_ps(quads[0], rows23, quads[1]), high23 = _mm512_permutex2var_ps(quads[2], rows23, quads[3]);
    vstore(scores, _mm512_shuffle_f32x4(low01, high01, 0x44));
    vstore(scores + kTileKeys, _mm512_shuffle_f32x4(low01, high01, 0xee));
    vstore(scores + 2 * kTileKeys, _mm512_shuffle_f32x4(low23, high23, 0x44));
    vstore(scores + 3 * kTileKeys, _mm512_shuffle_f32x4(low23, high23, 0xee));
}

template <>
struct FewRowsPath<TileProducts> {
    using TaskScratch = Scratch<TileProducts>;
    static bool takes(int rows) { return rows <= kFewTileRows; }

    static void attend_tiles(const AttentionTask& task, const AttentionTask* next, const TaskScratch& s, int rows) {
        const int end_key = task.first_position + task.num_queries, first = first_tile(task);
        TilePlaces places[2], first_of_next;
        TileFetch fetch;
        places[0].find(task, first, end_key);
        for (int key = first, turn = 0; key < end_key; key += kTileKeys, turn ^= 1) {
            const int num_keys = keys_of_tile(key, end_key);
            plan(task, next, key, key == first, end_key, places[turn ^ 1], first_of_next, fetch);
            attend_tile(task, s, places[turn], key, num_keys, rows, fetch);
        }
    }

  private:
    // What is fetched beside the tile at `key`: the task's next tile, or the next task's first one. A task's last tile may have
    // few keys; then memory would have little to do beside the tile before it and much beside the last one. So both together
    // fetch the last tile and the next task's, each as much as it has keys.
    static void plan(const AttentionTask& task, const AttentionTask* next, int key, bool is_first, int end_key, TilePlaces& own,
                     TilePlaces& first_of_next, TileFetch& fetch) {
        const int num_keys = keys_of_tile(key, end_key), next_key = key + kTileKeys;
        const bool is_last = next_key >= end_key, is_before_last = !is_last && next_key + kTileKeys >= end_key;
        if (is_before_last || (is_last && is_first)) first_of_next.find_first(next);
        if (is_last) {
            if (is_first) fetch.start(first_of_next);
            return fetch.spread(fetch.turns_left(), num_keys);
        }
        own.find(task, next_key, end_key);
        fetch.start(own, is_before_last ? &first_of_next : nullptr);
        int turns = own.turns();
        if (is_before_last && first_of_next.num_panels) {
            const int lines = turns * own.num_panels, both = lines + first_of_next.turns() * first_of_next.num_panels;
            const int share = both * num_keys / (num_keys + keys_of_tile(next_key, end_key));
            if (share > lines) turns += (share - lines) / first_of_next.num_panels;
        }
        fetch.spread(turns, num_keys);
    }
    // All rows of all KV heads. The scratch of arranged keys holds scores^T.
    static void attend_tile(const AttentionTask& task, const TaskScratch& s, const TilePlaces& tile, int key, int num_keys, int rows,
                            TileFetch& fetch) {
        const int head_dim = task.kv.head_dim;
        for (int head = 0; head < task.num_kv_heads; ++head) {
            const TaskScratch of_head = s.head(head, rows, head_dim);
            const size_t distance = head * tile.head_bytes;
            score(of_head, tile, distance, rows, num_keys, fetch);
            between_products<TileProducts>();
            fetch.turns(num_keys / 32 * tile.lines_of_row());
            softmax_block(task, of_head, {0, rows, key, num_keys});
            between_products<TileProducts>();
            for (int dim = 0; dim < head_dim; dim += 64)
                (head_dim - dim >= 64 ? &weigh<4> : &weigh<2>)((const uint8_t*)s.p, tile, tile.value_bytes + distance + dim * 2, num_keys,
                                                               of_head.out + dim, head_dim, fetch);
        }
    }
    // Scores of missing keys are whatever was there: they are masked.
    static void score(const TaskScratch& s, const TilePlaces& tile, size_t distance, int rows, int num_keys, TileFetch& fetch) {
        float* turned = (float*)s.keys;
        const int columns = score_columns(rows);
        for (int i = 0; i < tile.num_panels; ++i) {
            const uint8_t* keys = tile.panel[i].together(distance, tile.row_bytes, (uint8_t*)s.widened);
            score_panel(keys, tile.row_bytes, (const uint8_t*)s.q, turned + i * kPanelOutputs * columns, columns, fetch);
        }
        fetch.turns((num_keys / 64 + num_keys / kPanelOutputs - tile.num_panels) * tile.lines_of_row());
        for (int row = 0; row < rows; row += 4)
            for (int key = 0; key < num_keys; key += kPanelOutputs)
                turn_scores(turned + key * columns + row, columns, s.scores + row * kTileKeys + key);
    }
    // scores^T [16 keys][columns]
    static inline __attribute__((always_inline)) void score_panel(const uint8_t* keys, size_t row_bytes, const uint8_t* q, float* out,
                                                                  int columns, TileFetch& fetch) {
        tile_zero<kScoreTile>();
        for (size_t byte = 0; byte < row_bytes; byte += 64, q += kTileBytes) {
            tile_load<kQueryTile>(q, 64);
            tile_load<5>(keys + byte, row_bytes);
            tile_dot<kScoreTile, 5, kQueryTile>();
            fetch.turns(1);
        }
        tile_store<kScoreTile>(out, (size_t)columns * 4);
    }
    // O += P V of `kDimTiles` tiles of dims. While 32 keys are multiplied the next ones are interleaved: a tile that was just
    // written waits until its lines have reached the cache.
    template <int kDimTiles>
    static void weigh(const uint8_t* p, const TilePlaces& tile, size_t distance, int num_keys, float* out, int head_dim, TileFetch& fetch) {
        alignas(64) uint8_t values[2][kDimTiles * kTileBytes];
        load_sums<kDimTiles>(out, head_dim);
        interleave<kDimTiles>(tile, 0, distance, values[0], fetch);
        for (int key = 0; key < num_keys; key += 32) {
            const int turn = key / 32 % 2;
            if (key + 32 < num_keys)
                interleave<kDimTiles>(tile, (key + 32) / kPanelOutputs, distance, values[1 - turn], fetch);
            multiply<kDimTiles>(p + key * 2, values[turn]);
        }
        fetch.turns(num_keys / 32);
        store_sums<kDimTiles>(out, head_dim);
    }
    // [tile of dims][key pair][16 dims][2] of 32 keys
    template <int kDimTiles>
    static void interleave(const TilePlaces& tile, int first, size_t distance, uint8_t* out, TileFetch& fetch) {
        const size_t row_bytes = tile.row_bytes;
        for (int i = first; i < first + 2; ++i) {
            tiles_stay_awake<kScoreTile, 5, kQueryTile>();
            const PanelPlace* place = i < tile.num_panels ? tile.panel + i : nullptr;
            if (place && place->is_whole()) {
                for (int half = 0; half < 2; ++half) {
                    const uint8_t* rows = place->runs[half] + distance;
#pragma GCC unroll 4
                    for (int key = 0; key < kRunKeys; key += 2, rows += 2 * row_bytes, out += kRowBytes) {
                        interleave_pair<kDimTiles>(rows, rows + row_bytes, out, kTileBytes);
                        if (key % 4 == 0) fetch.turns(1);
                    }
                }
                continue;
            }
            const uint8_t* rows[kPanelOutputs];
            for (int key = 0; key < kPanelOutputs; ++key) rows[key] = kZeroRow;
            if (place) place->at(distance, row_bytes, rows);
            for (int key = 0; key < kPanelOutputs; key += 2, out += kRowBytes) {
                interleave_pair<kDimTiles>(rows[key], rows[key + 1], out, kTileBytes);
                if (key % 4 == 0) fetch.turns(1);
            }
        }
    }
    template <int kDimTiles>
    static void multiply(const uint8_t* p, const uint8_t* values) {
        tile_load<4>(p, kTileKeys * 2);
        tile_load<5>(values, 64);
        tile_dot<0, 4, 5>();
        tile_load<5>(values + kTileBytes, 64);
        tile_dot<1, 4, 5>();
        if constexpr (kDimTiles == 4) {
            tile_load<5>(values + 2 * kTileBytes, 64);
            tile_dot<2, 4, 5>();
            tile_load<5>(values + 3 * kTileBytes, 64);
            tile_dot<3, 4, 5>();
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
