// How tasks of few rows go through a tile of keys without arranged copies of it; what multiplies is the kernels' matter.
#pragma once
#include "kernels/attention_softmax.h"

namespace {

// Tasks of up to kFewRows rows: they take arranged tiles too, unless the instruction set has a way.
template <class Products>
struct FewRowsPath {
    static bool takes(int) { return false; }
    static void attend_tiles(const AttentionTask&, const AttentionTask*, const Scratch<Products>&, int) {}
};

// Kernels::score   scores[rows][kTileKeys] of 16 keys
// Kernels::weigh   out[rows][head_dim] += p V of a tile
// Kernels::finish  brings rows of O into the order of their dims
template <class Products, class Kernels>
struct FewRowsOf {
    using TaskScratch = Scratch<Products>;
    static bool takes(int rows) { return rows <= kFewRows; }

    static void attend_tiles(const AttentionTask& task, const AttentionTask* next, const TaskScratch& s, int rows) {
        const int end_key = task.first_position + task.num_queries;
        for (int key = first_tile(task); key < end_key; key += kTileKeys) attend_tile(task, s, key, end_key, rows);
        if (next) prefetch_start(*next);
        Kernels::finish(s.out, (size_t)task.num_kv_heads * rows * task.kv.head_dim);
    }

  private:
    // All rows of all KV heads against one tile. The scratch of arranged keys holds the scores instead.
    static void attend_tile(const AttentionTask& task, const TaskScratch& s, int key, int end_key, int rows) {
        if (task.window && key + kTileKeys <= least_position(task, 0) - task.window + 1) return;
        const int head_dim = task.kv.head_dim, num_keys = keys_of_tile(key, end_key);
        float* scores = (float*)s.keys;
        const uint8_t *keys[kTileKeys], *values[kTileKeys];
        score_tile(task, s, rows, key, end_key, num_keys, keys, scores);
        for (int head = 0; head < task.num_kv_heads; ++head) {
            TaskScratch of_head = s.head(head, rows, head_dim);
            of_head.scores = scores + (size_t)head * rows * kTileKeys;
            softmax_block(task, of_head, {0, rows, key, num_keys});
            const size_t distance = (task.kv.value_offset + head * task.kv.head_stride) * 2;
            for (int i = 0; i < num_keys; ++i) values[i] = keys[i] ? keys[i] + distance : kZeroRow;
            Kernels::weigh(s.p, rows, values, head_dim, num_keys, of_head.out);
        }
    }
    // scores[kv head][rows][kTileKeys] of the tile's keys; where these are, first KV head of the task, goes to `keys`, null
    // after the last valid one. Keys and values of later panels are fetched on the way.
    static void score_tile(const AttentionTask& task, const TaskScratch& s, int rows, int first_key, int end_key, int num_keys,
                           const uint8_t** keys, float* scores) {
        const size_t head_bytes = task.kv.head_stride * 2, value_bytes = task.kv.value_offset * 2;
        const int head_dim = task.kv.head_dim;
        const uint8_t* of_head[kPanelOutputs];
        for (int key = 0; key < num_keys; key += kPanelOutputs) {
            const int at = first_key + key, ahead = at + kPrefetchPanels * kPanelOutputs;
            const PanelRows panel(task, 2, at, end_key - at), next(task, 2, ahead, end_key - ahead);
            __builtin_memcpy(keys + key, panel.key, sizeof panel.key);
            for (int head = 0; head < task.num_kv_heads; ++head) {
                panel.at(head * head_bytes, of_head);
                next.prefetch(head * head_bytes, (size_t)head_dim * 2);
                next.prefetch(value_bytes + head * head_bytes, (size_t)head_dim * 2);
                Kernels::score(s.head(head, rows, head_dim).q, rows, of_head, head_dim,
                               scores + (size_t)head * rows * kTileKeys + key);
            }
        }
    }
};

}  // namespace
