// Paged attention in place, with online softmax: decode, verification of drafts and chunked prefill are one kernel.
//
// One task: consecutive query tokens of one sequence, the query heads of one KV head. Rows are (token, head) pairs, so
// each key and value is read once for the whole group and for all tokens. Keys come in tiles of 64 at fixed positions
// of the sequence: a row's result does not depend on which other rows, chunks or batches it is computed with.
//
//   for each tile: keys  -> [16 keys a panel][dims]      scores = Q K^T     (multiply_tile)
//                  values -> [16 dims a panel][keys]     O = O * correction + P V
//
// Bytes past the end of a sequence are never read: rows of zeros stand for them.
#pragma once
#include "kernels/dense_linear.h"
#include "kernels/elementwise.h"

namespace {

using tandem::AttentionTask;

constexpr int kTileKeys = 64;
constexpr int kMaxHeadDim = 256;
constexpr float kNegativeInfinity = -__builtin_inff();
alignas(64) constexpr uint8_t kZeroRow[kMaxHeadDim * 4] = {};

// Parts of the scratch memory of one task.
template <class Dot>
struct Scratch {
    using Activation = typename Dot::Activation;
    Activation* q;      // [rows, head_dim] packed in blocks
    float* out;         // [rows, head_dim] not yet divided by `sum`
    float* maximum;     // [rows]
    float* sum;         // [rows]
    float* scores;      // [block rows, kTileKeys]
    Activation* p;      // [block rows, kTileKeys]
    uint8_t* keys;      // [kTileKeys / 16 panels][steps of dims] rows of 64 bytes
    uint8_t* values;    // [head_dim / 16 panels][steps of keys] rows of 64 bytes
    float* widened;     // [2, kTileKeys, head_dim], where bfloat16 KV is computed in float32

    static size_t carve(uint8_t* base, int rows, int head_dim, Scratch* out) {
        uint8_t* at = base;
        auto take = [&at](size_t bytes) {
            uint8_t* part = at;
            at += (bytes + 63) / 64 * 64;
            return part;
        };
        Scratch s;
        s.q = (Activation*)take((size_t)rows * head_dim * 4);
        s.out = (float*)take((size_t)rows * head_dim * 4);
        s.maximum = (float*)take((size_t)rows * 4);
        s.sum = (float*)take((size_t)rows * 4);
        s.scores = (float*)take((size_t)kPairRows * kTileKeys * 4);
        s.p = (Activation*)take((size_t)kPairRows * kTileKeys * 4);
        s.keys = take((size_t)kTileKeys * head_dim * 4);
        s.values = take((size_t)kTileKeys * head_dim * 4);
        s.widened = (float*)take((size_t)2 * kTileKeys * head_dim * 4);
        if (out) *out = s;
        return (size_t)(at - base);
    }
};

inline size_t attention_scratch_bytes(int rows, int head_dim) {
    return Scratch<DotF32>::carve(nullptr, rows, head_dim, nullptr);
}

// Where the keys and values of one tile are; rows of zeros after the last valid key.
struct TileRows {
    const uint8_t* key[kTileKeys];
    const uint8_t* value[kTileKeys];

    TileRows(const AttentionTask& task, int first_key, int count) {
        const size_t element = task.kv.type == KvType::kBf16 ? 2 : 4;
        const size_t row_bytes = task.kv.head_dim * element;
        const uint8_t* head = task.kv.base + task.kv_head * task.kv.head_stride * element;
        int block = first_key / task.kv.block_tokens, offset = first_key % task.kv.block_tokens;
        for (int i = 0; i < kTileKeys; ++i) {
            if (i < count) {
                key[i] = head + (size_t)task.block_table[block] * task.kv.block_stride * element + offset * row_bytes;
                value[i] = key[i] + task.kv.value_offset * element;
                if (++offset == task.kv.block_tokens) offset = 0, ++block;
            } else {
                key[i] = value[i] = kZeroRow;
            }
        }
    }

    void prefetch(int count, size_t row_bytes) const {
        for (int i = 0; i < count; ++i)
            for (size_t byte = 0; byte < row_bytes; byte += 64) {
                __builtin_prefetch(key[i] + byte, 0, 2);
                __builtin_prefetch(value[i] + byte, 0, 2);
            }
    }
};

// keys[panel][step][16 keys] from rows of `steps` 32-bit words.
inline void arrange_keys(const uint8_t* const* rows, int num_keys, int steps, uint8_t* out) {
    for (int first = 0; first < num_keys; first += kPanelOutputs) {
        uint8_t* panel = out + (size_t)first / kPanelOutputs * steps * kRowBytes;
        for (int step = 0; step < steps; step += 16)
            transpose_16x16((const uint32_t* const*)(rows + first), step, (uint32_t*)(panel + step * kRowBytes));
    }
}

// values[panel][key pair][16 dims][2]
inline void arrange_values(const uint8_t* const* rows, int num_keys, int head_dim, uint8_t* out, DotBf16) {
    constexpr size_t kPanelBytes = kTileKeys / 2 * kRowBytes;
    for (int key = 0; key < num_keys; key += 2)
        for (int dim = 0; dim < head_dim; dim += 32) {
            uint8_t* to = out + dim / 16 * kPanelBytes + key / 2 * kRowBytes;
            interleave_32((const uint16_t*)rows[key] + dim, (const uint16_t*)rows[key + 1] + dim, (uint16_t*)to,
                          (uint16_t*)(to + kPanelBytes));
        }
}

// values[panel][key][16 dims]
inline void arrange_values(const uint8_t* const* rows, int num_keys, int head_dim, uint8_t* out, DotF32) {
    constexpr size_t kPanelBytes = kTileKeys * kRowBytes;
    for (int key = 0; key < num_keys; ++key)
        for (int dim = 0; dim < head_dim; dim += kWidth)
            vstore((float*)(out + dim / 16 * kPanelBytes + key * kRowBytes) + dim % 16,
                   vload((const float*)rows[key] + dim));
}

// Rows of bfloat16 as rows of float32 in `to`.
inline void widen_rows(const uint8_t** rows, int num_keys, int head_dim, float* to) {
    for (int key = 0; key < num_keys; ++key, to += head_dim) {
        for (int dim = 0; dim < head_dim; dim += kWidth)
            vstore(to + dim, vload_bf16((const uint16_t*)rows[key] + dim));
        rows[key] = (const uint8_t*)to;
    }
}

// One block of rows against the tile that is arranged in the scratch.
struct BlockTile {
    int first_row;
    int first_key;
    int num_keys;  // a multiple of 32; keys past a row's position are masked
};

// Turns a row's scores into weights exp(score - maximum), 0 outside [low, high), and corrects what was summed before.
template <class Dot>
inline void softmax_row(const AttentionTask& task, const Scratch<Dot>& s, int row, float* scores, int num_keys, int low,
                        int high, typename Dot::Activation* p) {
    for (int i = 0; i < low; ++i) scores[i] = kNegativeInfinity;
    for (int i = high > 0 ? high : 0; i < num_keys; ++i) scores[i] = kNegativeInfinity;
    F highest = vset1(kNegativeInfinity);
    for (int i = 0; i < num_keys; i += kWidth) highest = vmax(highest, vload(scores + i));
    const float before = s.maximum[row], tile_maximum = vmaximum(highest) * task.scale;
    const float maximum = tile_maximum > before ? tile_maximum : before;
    const bool nothing_seen = maximum == kNegativeInfinity;
    const F shift = vset1(nothing_seen ? 0.0f : maximum);
    F sum = vzero();
    for (int i = 0; i < num_keys; i += kWidth) {
        const F weight = vexp(vsub(vmul(vload(scores + i), vset1(task.scale)), shift));
        sum = vadd(sum, weight);
        if constexpr (Dot::kInputs == 2)
            vstore_bf16((uint16_t*)p + i, weight);
        else
            vstore((float*)p + i, weight);
    }
    if (maximum == before) {
        s.sum[row] += vsum(sum);
        return;
    }
    float lanes[kWidth];
    vstore(lanes, vexp(vset1(before - maximum)));
    const float correction = before == kNegativeInfinity ? 0.0f : lanes[0];
    s.maximum[row] = maximum;
    s.sum[row] = s.sum[row] * correction + vsum(sum);
    float* out = s.out + (size_t)row * task.kv.head_dim;
    for (int i = 0; i < task.kv.head_dim; i += kWidth) vstore(out + i, vmul(vload(out + i), vset1(correction)));
}

template <class Dot>
struct BlockAttention {
    using Function = void (*)(const AttentionTask&, const Scratch<Dot>&, const BlockTile&);

    template <int MR>
    static void run(const AttentionTask& task, const Scratch<Dot>& s, const BlockTile& tile) {
        constexpr int kKeySteps = kTileKeys / Dot::kInputs;
        const int head_dim = task.kv.head_dim, steps = head_dim / Dot::kInputs;
        const auto* q = s.q + (size_t)tile.first_row * steps;
        for (int key = 0; key < tile.num_keys; key += 32)
            multiply_tile<Dot, MR, 2, false>(q, MR, 1, s.keys + (size_t)key / 16 * steps * kRowBytes, steps * kRowBytes,
                                             steps, s.scores + key, kTileKeys, Sum::kStore);
        for (int m = 0; m < MR; ++m) {
            const int position = task.first_position + (tile.first_row + m) / task.group;
            const int end = position + 1 - tile.first_key;
            const int start = task.window ? position - task.window + 1 - tile.first_key : 0;
            const int high = end < tile.num_keys ? end : tile.num_keys;
            const int low = start > 0 ? (start < tile.num_keys ? start : tile.num_keys) : 0;
            softmax_row<Dot>(task, s, tile.first_row + m, s.scores + m * kTileKeys, tile.num_keys, low, high,
                             s.p + m * kKeySteps);
        }
        for (int dim = 0; dim < head_dim; dim += 32)
            multiply_tile<Dot, MR, 2, false>(s.p, 1, kKeySteps, s.values + (size_t)dim / 16 * kKeySteps * kRowBytes,
                                             kKeySteps * kRowBytes, tile.num_keys / Dot::kInputs,
                                             s.out + (size_t)tile.first_row * head_dim + dim, head_dim, Sum::kContinue);
    }
    template <int MR>
    static constexpr Function function() {
        return &run<MR>;
    }
    static constexpr auto kByRows = by_rows<BlockAttention>(std::make_index_sequence<kPairRows>());
};

template <class Dot>
inline void start_rows(const AttentionTask& task, const Scratch<Dot>& s, int rows, RowBlocks blocks) {
    const int head_dim = task.kv.head_dim;
    for (int row = 0; row < rows; ++row) {
        const float* q = task.q + row / task.group * task.q_stride + row % task.group * head_dim;
        for (int i = 0; i < head_dim; i += kWidth) vstore(s.out + (size_t)row * head_dim + i, vload(q + i));
        s.maximum[row] = kNegativeInfinity;
        s.sum[row] = 0.0f;
    }
    pack_rows(s.out, head_dim, blocks, rows, head_dim, head_dim, s.q);
    for (size_t i = 0; i < (size_t)rows * head_dim; i += kWidth) vstore(s.out + i, vzero());
}

template <class Dot>
inline void finish_rows(const AttentionTask& task, const Scratch<Dot>& s, int rows) {
    const int head_dim = task.kv.head_dim;
    for (int row = 0; row < rows; ++row) {
        float* out = task.out + row / task.group * task.out_stride + row % task.group * head_dim;
        const F inverse = vset1(1.0f / s.sum[row]);
        for (int i = 0; i < head_dim; i += kWidth)
            vstore(out + i, vmul(vload(s.out + (size_t)row * head_dim + i), inverse));
    }
}

template <class Dot>
inline void attend(const AttentionTask& task, void* scratch) {
    const int head_dim = task.kv.head_dim, rows = task.num_queries * task.group;
    const size_t row_bytes = head_dim * (task.kv.type == KvType::kBf16 ? 2 : 4);
    const RowBlocks blocks(rows, kPairRows);
    Scratch<Dot> s;
    Scratch<Dot>::carve((uint8_t*)scratch, rows, head_dim, &s);
    start_rows<Dot>(task, s, rows, blocks);
    const int end_key = task.first_position + task.num_queries;
    const int lowest = task.window && task.first_position >= task.window ? task.first_position - task.window + 1 : 0;
    for (int key = lowest / kTileKeys * kTileKeys; key < end_key; key += kTileKeys) {
        const int count = end_key - key < kTileKeys ? end_key - key : kTileKeys;
        TileRows tile(task, key, count);
        const int next = end_key - key - kTileKeys < kTileKeys ? end_key - key - kTileKeys : kTileKeys;
        if (next > 0) TileRows(task, key + kTileKeys, next).prefetch(next, row_bytes);
        const int num_keys = (count + 31) / 32 * 32;
        if (Dot::kInputs == 1 && task.kv.type == KvType::kBf16) {
            widen_rows(tile.key, num_keys, head_dim, s.widened);
            widen_rows(tile.value, num_keys, head_dim, s.widened + (size_t)kTileKeys * head_dim);
        }
        arrange_keys(tile.key, num_keys, head_dim / Dot::kInputs, s.keys);
        arrange_values(tile.value, num_keys, head_dim, s.values, Dot());
        for (int row = 0; row < rows; row += blocks.size) {
            const int mr = row + blocks.size <= rows ? blocks.size : rows - row;
            const int seen = task.first_position + (row + mr - 1) / task.group + 1 - key;  // keys of the last row
            if (seen <= 0) continue;
            if (task.window && key + kTileKeys <= task.first_position + row / task.group - task.window + 1) continue;
            const int wanted = (seen + 31) / 32 * 32;
            BlockAttention<Dot>::kByRows.entry[mr](task, s, {row, key, wanted < num_keys ? wanted : num_keys});
        }
    }
    finish_rows<Dot>(task, s, rows);
}

inline void attention(const AttentionTask& task, void* scratch) {
#ifdef __AVX512BF16__
    if (task.kv.type == KvType::kBf16) return attend<DotBf16>(task, scratch);
#endif
    attend<DotF32>(task, scratch);
}

}  // namespace
