// Paged attention in place, with online softmax: decode, verification of drafts and chunked prefill are one kernel.
//
// One task: consecutive query tokens of one sequence and some KV heads. Rows are (token, head) pairs, so each key and
// value is read once for the whole group and for all tokens. Keys come in tiles of 128 at fixed positions of the
// sequence: a row's result does not depend on which other rows, chunks or batches it is computed with.
//
//   for each tile, block after block as the pool has them:
//        keys   -> [16 keys a panel][dims]
//        values -> [16 dims a panel][keys]
//   for each KV head and block of rows:
//        scores = Q K^T, P = exp(scores - maximum), O = O * correction + P V      (multiply_tile)
//
// Bytes past the end of a sequence are never read: rows of zeros stand for them.
#pragma once
#include "kernels/dense_linear.h"
#include "kernels/elementwise.h"

namespace {

using tandem::AttentionTask;

constexpr int kTileKeys = 128;
constexpr int kMaxHeadDim = 256;
// How far ahead of the arranging loop keys and values are fetched, into the second cache. The pool's blocks of one layer
// lie far apart, so the processor's own prefetcher starts anew at each: measured 6.2 ms without, 3.7 ms with it, for
// one token at 2,048 tokens of context of the default model (the arithmetic alone takes 2.0).
constexpr int kPrefetchPanels = 2;
constexpr float kNegativeInfinity = -__builtin_inff();
alignas(64) constexpr uint8_t kZeroRow[kMaxHeadDim * 4] = {};

// Parts of the scratch memory of one task; all but the last four hold one part for each KV head.
template <class Dot>
struct Scratch {
    using Activation = typename Dot::Activation;
    Activation* q;    // [kv heads][rows, head_dim] packed in blocks
    float* out;       // [kv heads][rows, head_dim] not yet divided by `sum`
    float* maximum;   // [kv heads][rows]
    float* sum;       // [kv heads][rows, kWidth] a sum in each lane
    uint8_t* keys;    // [kv heads][kTileKeys / 16 panels][steps of dims] rows of 64 bytes
    uint8_t* values;  // [kv heads][head_dim / 16 panels][steps of keys] rows of 64 bytes
    float* scores;    // [block rows, kTileKeys]
    Activation* p;    // [block rows, kTileKeys]
    float* widened;   // [16, head_dim], where bfloat16 KV is computed in float32

    static size_t carve(uint8_t* base, int rows, int num_kv_heads, int head_dim, Scratch* out) {
        uint8_t* at = base;
        auto take = [&at](size_t bytes) {
            uint8_t* part = at;
            at += (bytes + 63) / 64 * 64;
            return part;
        };
        const size_t state = (size_t)num_kv_heads * rows, tile = (size_t)num_kv_heads * kTileKeys * head_dim;
        Scratch s;
        s.q = (Activation*)take(state * head_dim / Dot::kInputs * 4);
        s.out = (float*)take(state * head_dim * 4);
        s.maximum = (float*)take(state * 4);
        s.sum = (float*)take(state * kWidth * 4);
        s.keys = take(tile / Dot::kInputs * 4);
        s.values = take(tile / Dot::kInputs * 4);
        s.scores = (float*)take((size_t)kPairRows * kTileKeys * 4);
        s.p = (Activation*)take((size_t)kPairRows * kTileKeys * 4);
        s.widened = (float*)take((size_t)kPanelOutputs * head_dim * 4);
        if (out) *out = s;
        return (size_t)(at - base);
    }

    // The same with the parts of one KV head.
    Scratch head(int index, int rows, int head_dim) const {
        const size_t state = (size_t)index * rows, tile = (size_t)index * kTileKeys * head_dim / Dot::kInputs * 4;
        Scratch s = *this;
        s.q += state * head_dim / Dot::kInputs;
        s.out += state * head_dim;
        s.maximum += state;
        s.sum += state * kWidth;
        s.keys += tile;
        s.values += tile;
        return s;
    }
};

inline size_t attention_scratch_bytes(int rows, int num_kv_heads, int head_dim) {
    return Scratch<DotF32>::carve(nullptr, rows, num_kv_heads, head_dim, nullptr);
}

// The first key of the first tile that some row of the task sees.
inline int first_tile(const AttentionTask& task) {
    const bool sees_all = task.window == 0 || task.first_position < task.window;
    return sees_all ? 0 : (task.first_position - task.window + 1) / kTileKeys * kTileKeys;
}

// Where the keys of one panel are, first KV head of the task; null after the last valid key.
struct PanelRows {
    const uint8_t* key[kPanelOutputs];

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
inline void arrange_values(const uint8_t* const* rows, int head_dim, uint8_t* out, DotBf16) {
    constexpr size_t kPanelBytes = kTileKeys / 2 * kRowBytes;
    for (int key = 0; key < kPanelOutputs; key += 2)
        for (int dim = 0; dim < head_dim; dim += 32) {
            uint8_t* to = out + dim / 16 * kPanelBytes + key / 2 * kRowBytes;
            interleave_32((const uint16_t*)rows[key] + dim, (const uint16_t*)rows[key + 1] + dim, (uint16_t*)to,
                          (uint16_t*)(to + kPanelBytes));
        }
}

// 16 keys' part of [panel of 16 dims][key][16 dims]
inline void arrange_values(const uint8_t* const* rows, int head_dim, uint8_t* out, DotF32) {
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

// Fetches the panel that is `index` panels into the task.
inline void prefetch_panel(const AttentionTask& task, int index) {
    const size_t element = task.kv.type == KvType::kBf16 ? 2 : 4;
    const int end_key = task.first_position + task.num_queries, key = first_tile(task) + index * kPanelOutputs;
    const PanelRows panel(task, element, key, end_key - key);
    for (int head = 0; head < task.num_kv_heads; ++head) {
        panel.prefetch(head * task.kv.head_stride * element, task.kv.head_dim * element);
        panel.prefetch((task.kv.value_offset + head * task.kv.head_stride) * element, task.kv.head_dim * element);
    }
}

// Brings keys and values of up to `num_keys` keys into the scratch, in the order in which the pool has them: all heads' keys of
// a block, then all heads' values.
template <class Dot>
inline void arrange_tile(const AttentionTask& task, const Scratch<Dot>& s, int first_key, int end_key, int num_keys) {
    const int head_dim = task.kv.head_dim, steps = head_dim / Dot::kInputs;
    const bool widen = Dot::kInputs == 1 && task.kv.type == KvType::kBf16;
    const size_t element = task.kv.type == KvType::kBf16 ? 2 : 4;
    const size_t head_bytes = task.kv.head_stride * element, tile_bytes = (size_t)kTileKeys * steps * 4;
    const uint8_t* rows[kPanelOutputs];
    for (int key = 0; key < num_keys; key += kPanelOutputs) {
        const int at = first_key + key, ahead = at + kPrefetchPanels * kPanelOutputs;
        const PanelRows panel(task, element, at, end_key - at), next(task, element, ahead, end_key - ahead);
        for (int head = 0; head < task.num_kv_heads; ++head) {
            panel.at(head * head_bytes, rows);
            next.prefetch(head * head_bytes, head_dim * element);
            if (widen) widen_rows(rows, head_dim, s.widened);
            arrange_keys(rows, steps, s.keys + head * tile_bytes + (size_t)key / 16 * steps * kRowBytes);
        }
        for (int head = 0; head < task.num_kv_heads; ++head) {
            panel.at(task.kv.value_offset * element + head * head_bytes, rows);
            next.prefetch(task.kv.value_offset * element + head * head_bytes, head_dim * element);
            if (widen) widen_rows(rows, head_dim, s.widened);
            arrange_values(rows, head_dim, s.values + head * tile_bytes + (size_t)key / Dot::kInputs * kRowBytes, Dot());
        }
    }
}

// One block of rows against the tile that is arranged in the scratch.
struct BlockTile {
    int first_row;
    int first_key;
    int num_keys;  // a multiple of 32; keys past a row's position are masked
};

// Turns a row's scores into weights 2^(score * scale - maximum), 0 outside [low, high), and corrects what was summed
// before. The scale holds log2(e), so the maximum is kept in powers of two.
template <class Dot>
inline void softmax_row(const AttentionTask& task, const Scratch<Dot>& s, int row, float* scores, int num_keys, int low,
                        int high, typename Dot::Activation* p) {
    const float scale = task.scale * kLog2E;
    for (int i = 0; i < low; ++i) scores[i] = kNegativeInfinity;
    for (int i = high > 0 ? high : 0; i < num_keys; ++i) scores[i] = kNegativeInfinity;
    F highest = vset1(kNegativeInfinity);
    for (int i = 0; i < num_keys; i += kWidth) highest = vmax(highest, vload(scores + i));
    const float before = s.maximum[row], tile_maximum = vmaximum(highest) * scale;
    const float maximum = tile_maximum > before ? tile_maximum : before;
    float* sum_lanes = s.sum + (size_t)row * kWidth;
    F sum = vload(sum_lanes);
    if (maximum != before) {
        const F correction = before == kNegativeInfinity ? vzero() : vexp2(vset1(before - maximum));
        s.maximum[row] = maximum;
        sum = vmul(sum, correction);
        float* out = s.out + (size_t)row * task.kv.head_dim;
        for (int i = 0; i < task.kv.head_dim; i += kWidth) vstore(out + i, vmul(vload(out + i), correction));
    }
    const F shift = vset1(maximum == kNegativeInfinity ? 0.0f : maximum);
    for (int i = 0; i < num_keys; i += kWidth) {
        const F weight = vexp2(vsub(vmul(vload(scores + i), vset1(scale)), shift));
        sum = vadd(sum, weight);
        if constexpr (Dot::kInputs == 2)
            vstore_bf16((uint16_t*)p + i, weight);
        else
            vstore((float*)p + i, weight);
    }
    vstore(sum_lanes, sum);
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
            multiply_tile<Dot, MR, 2, false, false>(q, MR, 1, s.keys + (size_t)key / 16 * steps * kRowBytes, steps * kRowBytes,
                                             steps, s.scores + key, kTileKeys, false);
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
            multiply_tile<Dot, MR, 2, false, true>(s.p, 1, kKeySteps, s.values + (size_t)dim / 16 * kKeySteps * kRowBytes,
                                             kKeySteps * kRowBytes, tile.num_keys / Dot::kInputs,
                                             s.out + (size_t)tile.first_row * head_dim + dim, head_dim, false);
    }
    template <int MR>
    static constexpr Function function() {
        return &run<MR>;
    }
    static constexpr auto kByRows = by_rows<BlockAttention>(std::make_index_sequence<kPairRows>());
};

template <class Dot>
inline void start_rows(const AttentionTask& task, const Scratch<Dot>& s, int head, int rows, RowBlocks blocks) {
    const int head_dim = task.kv.head_dim;
    const float* first = task.q + (size_t)head * task.group * head_dim;
    for (int row = 0; row < rows; ++row) {
        const float* q = first + row / task.group * task.q_stride + row % task.group * head_dim;
        for (int i = 0; i < head_dim; i += kWidth) vstore(s.out + (size_t)row * head_dim + i, vload(q + i));
        s.maximum[row] = kNegativeInfinity;
        vstore(s.sum + (size_t)row * kWidth, vzero());
    }
    pack_rows(s.out, head_dim, blocks, rows, head_dim, head_dim, s.q);
    for (size_t i = 0; i < (size_t)rows * head_dim; i += kWidth) vstore(s.out + i, vzero());
}

template <class Dot>
inline void finish_rows(const AttentionTask& task, const Scratch<Dot>& s, int head, int rows) {
    const int head_dim = task.kv.head_dim;
    float* first = task.out + (size_t)head * task.group * head_dim;
    for (int row = 0; row < rows; ++row) {
        float* out = first + row / task.group * task.out_stride + row % task.group * head_dim;
        const F inverse = vset1(1.0f / vsum(vload(s.sum + (size_t)row * kWidth)));
        for (int i = 0; i < head_dim; i += kWidth)
            vstore(out + i, vmul(vload(s.out + (size_t)row * head_dim + i), inverse));
    }
}

// All rows of one KV head that see keys of the arranged tile.
template <class Dot>
inline void attend_tile(const AttentionTask& task, const Scratch<Dot>& s, int key, int num_keys, int rows,
                        RowBlocks blocks) {
    for (int row = 0; row < rows; row += blocks.size) {
        const int mr = row + blocks.size <= rows ? blocks.size : rows - row;
        const int seen = task.first_position + (row + mr - 1) / task.group + 1 - key;  // keys of the last row
        if (seen <= 0) continue;
        if (task.window && key + kTileKeys <= task.first_position + row / task.group - task.window + 1) continue;
        const int wanted = (seen + 31) / 32 * 32;
        BlockAttention<Dot>::kByRows.entry[mr](task, s, {row, key, wanted < num_keys ? wanted : num_keys});
    }
}

template <class Dot>
inline void attend(const AttentionTask& task, const AttentionTask* next, void* scratch) {
    const int head_dim = task.kv.head_dim, rows = task.num_queries * task.group;
    const RowBlocks blocks(rows, kPairRows);
    Scratch<Dot> s;
    Scratch<Dot>::carve((uint8_t*)scratch, rows, task.num_kv_heads, head_dim, &s);
    for (int head = 0; head < task.num_kv_heads; ++head)
        start_rows<Dot>(task, s.head(head, rows, head_dim), head, rows, blocks);
    const int end_key = task.first_position + task.num_queries;
    for (int key = first_tile(task); key < end_key; key += kTileKeys) {
        const int count = end_key - key < kTileKeys ? end_key - key : kTileKeys;
        const int num_keys = (count + 31) / 32 * 32;
        arrange_tile<Dot>(task, s, key, end_key, num_keys);
        for (int head = 0; head < task.num_kv_heads; ++head)
            attend_tile<Dot>(task, s.head(head, rows, head_dim), key, num_keys, rows, blocks);
    }
    if (next)
        for (int panel = 0; panel < kPrefetchPanels; ++panel) prefetch_panel(*next, panel);
    for (int head = 0; head < task.num_kv_heads; ++head)
        finish_rows<Dot>(task, s.head(head, rows, head_dim), head, rows);
}

inline void attention(const AttentionTask& task, const AttentionTask* next, void* scratch) {
#ifdef __AVX512BF16__
    if (task.kv.type == KvType::kBf16) return attend<DotBf16>(task, next, scratch);
#endif
    attend<DotF32>(task, next, scratch);
}

}  // namespace
