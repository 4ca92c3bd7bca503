// Where attention keeps its parts in scratch memory, and how keys and values come there from the pool.
#pragma once
#include "kernel_table.h"
#include "kernels/vec.h"

namespace {

using tandem::KvType;
using tandem::kPanelOutputs;
using tandem::kRowBytes;
using tandem::AttentionTask;

constexpr int kTileKeys = 128;
constexpr int kMaxHeadDim = 256;
constexpr int kFewRows = 8;  // of tasks that need no arranged tiles: accumulators, a pair of values and what they become fit
// How far ahead of the arranging loop keys and values are fetched, into the second cache. The pool's blocks of one layer
// lie far apart, so the processor's own prefetcher starts anew at each: without this the loop takes twice the time. Zen 4
// drops such a request while its queue is full, so the shortest lead is the best: attention of 16 streams at 2,048 tokens
// takes 47 ms a step with one panel, 55 with two, 59 with four.
constexpr int kPrefetchPanels = 1;
constexpr float kNegativeInfinity = -__builtin_inff();  // of a hidden key
constexpr float kLowest = -3.4e38f;                     // of a row that has seen no key
alignas(64) constexpr uint8_t kZeroRow[kMaxHeadDim * 4] = {};

// Where products of attention differ from most.
template <class Products>
struct Traits {
    static constexpr bool kScalesQueries = false;                // by attention's scale and to powers of two
    static constexpr bool kBf16Values = Products::kInputs == 2;  // which need no finer weights
    static constexpr float kValueScale = 1.0f;                   // that O has until the end
    static void store_weights(typename Products::Activation* p, int key, const F (&weights)[2]) {
        if constexpr (Products::kInputs == 2) {
            vstore_bf16_pair((uint16_t*)p + key, weights[0], weights[1]);
        } else {
            vstore((float*)p + key, weights[0]);
            vstore((float*)p + key + kWidth, weights[1]);
        }
    }
    // What is subtracted from exponents from a tile on.
    static F raise(F maximum, F of_tile) { return vmax(maximum, of_tile); }
    static void restore_dims(float*, int) {}  // of a row of O whose dims are in another order until the end
};

// Called where something other than products takes long: before and after a task's rows, and beside a softmax of few rows. Not
// between the many rows of one, where a prompt of 2,048 tokens took 1.04 times as long, probably for the clock: it is lower while
// tiles are in use most of the time.
template <class Products>
inline void between_products() {}

// Parts of the scratch memory of one task; all but the last four hold one part for each KV head.
template <class Products>
struct Scratch {
    using Activation = typename Products::Activation;
    static constexpr int kInputs = Products::kInputs;
    Activation* q;    // [kv heads][rows, head_dim] packed in blocks
    float* out;       // [kv heads][rows, head_dim] not yet divided by `sum`
    float* maximum;   // [kv heads][rows]
    float* sum;       // [kv heads][rows, kWidth] a sum in each lane
    uint8_t* keys;    // [kv heads][kTileKeys / 16 panels][steps of dims] rows of 64 bytes
    uint8_t* values;  // [kv heads][head_dim / 16 panels][steps of keys] rows of 64 bytes
    float* scores;    // [block rows, kTileKeys]
    Activation* p;    // [block rows, kTileKeys]; floats take the scores' place
    float* widened;   // [16, head_dim], where bfloat16 KV is computed in float32

    static size_t carve(uint8_t* base, int rows, int num_kv_heads, int head_dim, Scratch* out) {
        uint8_t* at = base;
        auto take = [&at](size_t bytes) {
            uint8_t* part = at;
            at += (bytes + 63) / 64 * 64;
            return part;
        };
        const size_t state = (size_t)num_kv_heads * Products::state_rows(rows);
        const size_t tile = (size_t)num_kv_heads * kTileKeys * head_dim;
        Scratch s;
        s.q = (Activation*)take(state * head_dim / kInputs * 4);
        s.out = (float*)take(state * head_dim * 4);
        s.maximum = (float*)take(state * 4);
        s.sum = (float*)take(state * kWidth * 4);
        s.keys = take(tile / kInputs * 4);
        s.values = take(tile / kInputs * 4);
        s.scores = (float*)take((size_t)Products::kBlockRows * kTileKeys * 4);
        s.p = kInputs == 1 ? (Activation*)s.scores : (Activation*)take((size_t)Products::kBlockRows * kTileKeys * 4);
        s.widened = (float*)take((size_t)kPanelOutputs * head_dim * 4);
        if (out) *out = s;
        return (size_t)(at - base);
    }

    // The same with the parts of one KV head.
    Scratch head(int index, int rows, int head_dim) const {
        const size_t state = (size_t)index * Products::state_rows(rows);
        const size_t tile = (size_t)index * kTileKeys * head_dim / kInputs * 4;
        Scratch s = *this;
        s.q += state * head_dim / kInputs;
        s.out += state * head_dim;
        s.maximum += state;
        s.sum += state * kWidth;
        s.keys += tile;
        s.values += tile;
        return s;
    }
};

// The least position that `row` or a later row of the task may have: a tree's rows stand anywhere below its root.
inline int least_position(const AttentionTask& task, int row) {
    return task.tree_masks ? task.first_position - task.first_row : task.first_position + row;
}

// The first key of the first tile that some row of the task sees.
inline int first_tile(const AttentionTask& task) {
    const int position = least_position(task, 0);
    const bool sees_all = task.window == 0 || position < task.window;
    return sees_all ? 0 : (position - task.window + 1) / kTileKeys * kTileKeys;
}

// Keys of the tile at `key`, rounded up to what products take together.
inline int keys_of_tile(int key, int end_key) { return end_key - key < kTileKeys ? (end_key - key + 31) / 32 * 32 : kTileKeys; }

// Where the keys of one panel are, first KV head of the task; null after the last valid key.
struct PanelRows {
    const uint8_t* key[kPanelOutputs];

    PanelRows() = default;
    PanelRows(const AttentionTask& task, size_t element, int first_key, int count) {
        const size_t row_bytes = task.kv.head_dim * element;
        const uint8_t* base = task.kv.base + task.first_kv_head * task.kv.head_stride * element;
        int block = first_key / task.kv.block_tokens, offset = first_key % task.kv.block_tokens;
        for (int i = 0; i < kPanelOutputs; ++i) {
            key[i] = nullptr;
            if (i >= count) continue;
            key[i] = base + (size_t)task.block_table[block] * task.kv.block_stride * element + offset * row_bytes;
            if (++offset == task.kv.block_tokens) offset = 0, ++block;
        }
    }

    // The same rows `distance` bytes on: another head, or values.
    void at(size_t distance, const uint8_t** rows) const {
        for (int i = 0; i < kPanelOutputs; ++i) rows[i] = key[i] ? key[i] + distance : kZeroRow;
    }

    void prefetch(size_t distance, size_t row_bytes) const {
        for (int i = 0; i < kPanelOutputs && key[i]; ++i)
            for (size_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(key[i] + distance + byte, 0, 2);
    }
};

// One panel of 16 keys from rows of `steps` 32-bit words: [step][16 keys].
inline void arrange_keys(const uint8_t* const* rows, int steps, uint8_t* panel) {
    for (int step = 0; step < steps; step += 16)
        transpose_16x16(rows, step, (uint32_t*)(panel + step * kRowBytes));
}

// 16 keys' part of [panel of 16 dims][key pair][16 dims][2]
inline void arrange_value_pairs(const uint8_t* const* rows, int head_dim, uint8_t* out) {
    constexpr size_t kPanelBytes = kTileKeys / 2 * kRowBytes;
    for (int key = 0; key < kPanelOutputs; key += 2)
        for (int dim = 0; dim < head_dim; dim += 32) {
            uint8_t* to = out + dim / 16 * kPanelBytes + key / 2 * kRowBytes;
            interleave_32((const uint16_t*)rows[key] + dim, (const uint16_t*)rows[key + 1] + dim, (uint16_t*)to,
                          (uint16_t*)(to + kPanelBytes));
        }
}

// 16 keys' part of [panel of 16 dims][key][16 dims]
inline void arrange_values(const uint8_t* const* rows, int head_dim, uint8_t* out) {
    constexpr size_t kPanelBytes = kTileKeys * kRowBytes;
    for (int key = 0; key < kPanelOutputs; ++key)
        for (int dim = 0; dim < head_dim; dim += kWidth)
            vstore((float*)(out + dim / 16 * kPanelBytes + key * kRowBytes) + dim % 16,
                   vload((const float*)rows[key] + dim));
}

// Rows of bfloat16 as rows of float32 in `to`.
inline void widen_rows(const uint8_t** rows, int head_dim, float* to) {
    for (int key = 0; key < kPanelOutputs; ++key, to += head_dim) {
        for (int dim = 0; dim < head_dim; dim += kWidth)
            vstore(to + dim, vload_bf16((const uint16_t*)rows[key] + dim));
        rows[key] = (const uint8_t*)to;
    }
}

// Fetches the first panels of a task.
inline void prefetch_start(const AttentionTask& task) {
    const size_t element = task.kv.type == KvType::kBf16 ? 2 : 4;
    const int end_key = task.first_position + task.num_queries;
    for (int index = 0; index < kPrefetchPanels; ++index) {
        const int key = first_tile(task) + index * kPanelOutputs;
        const PanelRows panel(task, element, key, end_key - key);
        for (int head = 0; head < task.num_kv_heads; ++head) {
            panel.prefetch(head * task.kv.head_stride * element, task.kv.head_dim * element);
            panel.prefetch((task.kv.value_offset + head * task.kv.head_stride) * element, task.kv.head_dim * element);
        }
    }
}

// How products that do not say it themselves want 16 keys or values, `key` keys into the tile.
template <class Products>
struct Arrangement {
    static constexpr bool kWidens = Products::kInputs == 1;  // bfloat16 that is computed in float32

    static void keys(const uint8_t* const* rows, int head_dim, int key, uint8_t* tile) {
        const int steps = head_dim / Products::kInputs;
        arrange_keys(rows, steps, tile + (size_t)key / kPanelOutputs * steps * kRowBytes);
    }
    static void values(const uint8_t* const* rows, int head_dim, int key, uint8_t* tile) {
        uint8_t* to = tile + (size_t)key / Products::kInputs * kRowBytes;
        if constexpr (Products::kInputs == 2)
            arrange_value_pairs(rows, head_dim, to);
        else
            arrange_values(rows, head_dim, to);
    }
};

// Brings keys and values of up to `num_keys` keys into the scratch, in the order in which the pool has them: all heads' keys of
// a block, then all heads' values.
template <class Products>
inline void arrange_tile(const AttentionTask& task, const Scratch<Products>& s, int first_key, int end_key, int num_keys) {
    const int head_dim = task.kv.head_dim;
    const bool widen = Arrangement<Products>::kWidens && task.kv.type == KvType::kBf16;
    const size_t element = task.kv.type == KvType::kBf16 ? 2 : 4, row_bytes = head_dim * element;
    const size_t head_bytes = task.kv.head_stride * element, value_bytes = task.kv.value_offset * element;
    const size_t tile_bytes = (size_t)kTileKeys * head_dim / Products::kInputs * 4;
    const uint8_t* rows[kPanelOutputs];
    for (int key = 0; key < num_keys; key += kPanelOutputs) {
        const int at = first_key + key, ahead = at + kPrefetchPanels * kPanelOutputs;
        const PanelRows panel(task, element, at, end_key - at), next(task, element, ahead, end_key - ahead);
        for (int head = 0; head < task.num_kv_heads; ++head) {
            panel.at(head * head_bytes, rows);
            next.prefetch(head * head_bytes, row_bytes);
            if (widen) widen_rows(rows, head_dim, s.widened);
            Arrangement<Products>::keys(rows, head_dim, key, s.keys + head * tile_bytes);
        }
        for (int head = 0; head < task.num_kv_heads; ++head) {
            panel.at(value_bytes + head * head_bytes, rows);
            next.prefetch(value_bytes + head * head_bytes, row_bytes);
            if (widen) widen_rows(rows, head_dim, s.widened);
            Arrangement<Products>::values(rows, head_dim, key, s.values + head * tile_bytes);
        }
    }
}

}  // namespace
