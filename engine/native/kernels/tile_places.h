// Where a tile's keys and values are in the pool, and how the next tile's come into the second cache meanwhile.
#pragma once
#include "kernels/attention_layout.h"

namespace {

// 16 keys of the task's first KV head, and with the right distance (see PanelRows) their values and those of other heads.
struct PanelPlace {
    PanelRows rows;
    bool is_run;  // they lie one behind the other, and none is missing

    PanelPlace() = default;
    PanelPlace(const AttentionTask& task, int key, int end_key) : rows(task, 2, key, end_key - key) {
        const uint8_t* last = rows.key[kPanelOutputs - 1];
        is_run = last && last == rows.key[0] + (kPanelOutputs - 1) * (size_t)task.kv.head_dim * 2;
    }
    // The 16 rows one behind the other: in the pool, or copied.
    const uint8_t* run(size_t distance, int head_dim, uint8_t* copy) const {
        if (is_run) return rows.key[0] + distance;
        const uint8_t* from[kPanelOutputs];
        rows.at(distance, from);
        for (int i = 0; i < kPanelOutputs; ++i) __builtin_memcpy(copy + (size_t)i * head_dim * 2, from[i], (size_t)head_dim * 2);
        return copy;
    }
};

struct TilePlaces {
    PanelPlace panel[kTileKeys / kPanelOutputs];
    int num_panels = 0;  // with keys
    int num_heads = 0;
    size_t head_bytes = 0, value_bytes = 0, row_bytes = 0;

    TilePlaces() = default;
    TilePlaces(const AttentionTask& task, int first_key, int end_key)
        : num_heads(task.num_kv_heads),
          head_bytes(task.kv.head_stride * 2),
          value_bytes(task.kv.value_offset * 2),
          row_bytes((size_t)task.kv.head_dim * 2) {
        for (int key = 0; key < kTileKeys; key += kPanelOutputs) {
            panel[key / kPanelOutputs] = PanelPlace(task, first_key + key, end_key);
            num_panels += first_key + key < end_key;
        }
    }
    // The tile after the one at `key`: of this task, or else the first one of the next task; none without one.
    static TilePlaces after(const AttentionTask& task, const AttentionTask* next, int key, int end_key) {
        if (key + kTileKeys < end_key) return TilePlaces(task, key + kTileKeys, end_key);
        return next ? TilePlaces(*next, first_tile(*next), next->first_position + next->num_queries) : TilePlaces();
    }
};

// Fetches a tile's lines all along the work on the tile before. The pool's blocks of one layer lie far apart, so the
// processor's own prefetcher starts anew at each, and a core asks for 16 lines at a time: who asks for more waits. So all
// panels take turns, a line of each, which the prefetcher follows as eight streams, and there is a turn wherever the core
// would else wait. Attention of 16 streams at 2,048 tokens takes three quarters of its time with panel after panel in bursts.
class TileFetch {
  public:
    // `num_keys`: of the tile before.
    TileFetch(const TilePlaces& tile, int num_keys)
        : tile_(tile), left_(tile.num_panels ? tile.num_heads * turns_of_head() : 0), times_((kTileKeys + num_keys - 1) / num_keys) {
        start_part();
    }
    // Of as many the work on one head has to call for.
    int turns_of_head() const { return (int)(2 * kPanelOutputs * tile_.row_bytes / 64); }

    inline __attribute__((always_inline)) void turns(int count) {
        for (count *= times_; count > 0 && left_ > 0; --count) turn();
    }

  private:
    inline __attribute__((always_inline)) void turn() {
        for (int i = 0; i < tile_.num_panels; ++i) {
            const uint8_t* key = tile_.panel[i].rows.key[row_];
            if (key) __builtin_prefetch(key + distance_ + byte_, 0, 2);
        }
        --left_;
        if ((byte_ += 64) < tile_.row_bytes) return;
        byte_ = 0;
        if (++row_ < kPanelOutputs) return;
        row_ = 0;
        ++part_;
        start_part();
    }
    void start_part() {
        const bool is_values = part_ >= tile_.num_heads;
        distance_ = is_values ? tile_.value_bytes + (size_t)(part_ - tile_.num_heads) * tile_.head_bytes : (size_t)part_ * tile_.head_bytes;
    }

    const TilePlaces& tile_;
    int left_, times_;
    int part_ = 0, row_ = 0;  // keys of each head, then values of each head
    size_t byte_ = 0, distance_ = 0;
};

}  // namespace
