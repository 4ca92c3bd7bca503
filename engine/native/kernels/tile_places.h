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

    int lines_of_row() const { return (int)(row_bytes / 64); }

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
// panels take turns, a line of each, which the prefetcher follows as eight streams, and turns are spread over the work, as many
// as it takes to fetch everything: a line that is not asked for is waited for later. Attention of 16 streams at 2,048 tokens
// takes three quarters of its time with panel after panel in bursts.
class TileFetch {
  public:
    // `num_keys`: of the tile before, a multiple of 32.
    TileFetch(const TilePlaces& tile, int num_keys)
        : tile_(tile), num_keys_(num_keys), half_(kRunKeys * tile.row_bytes), parts_(tile.num_panels ? 2 * tile.num_heads : 0) {
        for (int i = 0; i < tile.num_panels; ++i) {
            const uint8_t* const* keys = tile.panel[i].rows.key;
            runs_[0][i] = keys[0];
            runs_[1][i] = keys[kRunKeys] ? keys[kRunKeys] - half_ : keys[0];
        }
        if (parts_)
            for (const uint8_t* const* keys = tile.panel[tile.num_panels - 1].rows.key;
                 last_bytes_ < 2 * half_ && keys[last_bytes_ / tile.row_bytes];)
                last_bytes_ += tile.row_bytes;
        start_part();
    }

    // Work on one head calls for as many turns for each line of a row as a panel has keys and values, if the tile has all keys.
    inline __attribute__((always_inline)) void turns(int count) {
        for (due_ += count * kTileKeys; due_ >= num_keys_ && part_ < parts_; due_ -= num_keys_) turn();
    }

  private:
    static constexpr int kRunKeys = kPanelOutputs / 2;  // one behind the other; of smaller blocks some lines are missed

    inline __attribute__((always_inline)) void turn() {
        const uint8_t* const* runs = runs_[byte_ >= half_];
        const int panels = byte_ < last_bytes_ ? tile_.num_panels : tile_.num_panels - 1;
        for (int i = 0; i < panels; ++i) __builtin_prefetch(runs[i] + distance_ + byte_, 0, 2);
        if ((byte_ += 64) < 2 * half_) return;
        ++part_;
        start_part();
    }
    void start_part() {
        const bool is_values = part_ >= tile_.num_heads;
        distance_ = is_values ? tile_.value_bytes + (size_t)(part_ - tile_.num_heads) * tile_.head_bytes : (size_t)part_ * tile_.head_bytes;
        byte_ = 0;
    }

    const TilePlaces& tile_;
    const int num_keys_;
    const size_t half_;           // bytes of a run
    size_t last_bytes_ = 0;       // of the last panel
    int part_ = 0, parts_;        // keys of each head, then values of each head
    int due_ = 0;                 // turns times `num_keys_`
    size_t byte_ = 0, distance_ = 0;
    const uint8_t* runs_[2][kTileKeys / kPanelOutputs];  // of each panel; the second ones less `half_`
};

}  // namespace
