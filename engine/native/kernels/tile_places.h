// Where a tile's keys and values are in the pool, and how the next tile's come into the second cache meanwhile.
#pragma once
#include "kernels/attention_layout.h"

namespace {

constexpr int kRunKeys = kPanelOutputs / 2;  // one behind the other, where a block is a multiple of them

// 16 keys of the task's first KV head, and with the right distance their values and those of other heads. Tasks are many and
// short, and nothing is fetched while places are looked up: in blocks of 8, 16, 24 ... tokens they are two runs.
struct PanelPlace {
    const uint8_t* runs[2];  // null: no keys. In other blocks the first and the ninth key, for fetches alone
    int num_keys;
    bool are_runs;  // else `rows` says where each key is
    PanelRows rows;

    bool is_whole() const { return are_runs && num_keys == kPanelOutputs; }

    // Each key's row; zeros for keys that are missing.
    void at(size_t distance, size_t row_bytes, const uint8_t** out) const {
        if (!are_runs) return rows.at(distance, out);
        for (int i = 0; i < kPanelOutputs; ++i)
            out[i] = i < num_keys ? runs[i / kRunKeys] + distance + i % kRunKeys * row_bytes : kZeroRow;
    }
    // The 16 rows one behind the other: in the pool, or copied. Those of missing keys are whatever the pool has there.
    const uint8_t* together(size_t distance, size_t row_bytes, uint8_t* copy) const {
        if (are_runs && runs[1] == runs[0] + kRunKeys * row_bytes) return runs[0] + distance;
        const uint8_t* from[kPanelOutputs];
        at(distance, row_bytes, from);
        for (int i = 0; i < kPanelOutputs; ++i)
            for (size_t byte = 0; byte < row_bytes; byte += 64) istore(copy + i * row_bytes + byte, iload(from[i] + byte));
        return copy;
    }
};

struct TilePlaces {
    PanelPlace panel[kTileKeys / kPanelOutputs];
    int num_panels = 0;  // with keys; the places of others are not set
    int num_heads = 0;
    size_t head_bytes = 0, value_bytes = 0, row_bytes = 0;

    int lines_of_row() const { return (int)(row_bytes / 64); }
    // Of the keys, or the values, of one head in the panel that has most.
    size_t run_bytes() const { return num_panels == 1 ? panel[0].num_keys * row_bytes : kPanelOutputs * row_bytes; }
    // What a turn fetches of each panel: two lines, if rows have even numbers of them.
    size_t turn_bytes() const { return row_bytes % 128 ? 64 : 128; }
    // That fetch everything.
    int turns() const { return num_panels ? 2 * num_heads * (int)(run_bytes() / turn_bytes()) : 0; }

    void find(const AttentionTask& task, int first_key, int end_key) {
        num_heads = task.num_kv_heads;
        head_bytes = task.kv.head_stride * 2;
        value_bytes = task.kv.value_offset * 2;
        row_bytes = (size_t)task.kv.head_dim * 2;
        const int count = end_key - first_key < kTileKeys ? end_key - first_key : kTileKeys;
        num_panels = (count + kPanelOutputs - 1) / kPanelOutputs;
        if (task.kv.block_tokens % kRunKeys == 0)
            find_runs(task, first_key, count);
        else
            for (int i = 0; i < num_panels; ++i) find_rows(task, first_key + i * kPanelOutputs, count - i * kPanelOutputs, panel[i]);
    }
    // The first tile of a task; no panels without one.
    void find_first(const AttentionTask* task) {
        num_panels = 0;
        if (task) find(*task, first_tile(*task), task->first_position + task->num_queries);
    }

  private:
    void find_runs(const AttentionTask& task, int first_key, int count) {
        const size_t block_bytes = task.kv.block_stride * 2, run_bytes = kRunKeys * row_bytes;
        const uint8_t* base = task.kv.base + task.first_kv_head * head_bytes;
        const int32_t* block = task.block_table + first_key / task.kv.block_tokens;
        int run = first_key % task.kv.block_tokens / kRunKeys;
        const int runs_of_block = task.kv.block_tokens / kRunKeys;
        for (int i = 0; i < num_panels; ++i) {
            PanelPlace& place = panel[i];
            place.are_runs = true;
            place.num_keys = count - i * kPanelOutputs < kPanelOutputs ? count - i * kPanelOutputs : kPanelOutputs;
            for (int half = 0; half < 2; ++half) {
                place.runs[half] = nullptr;
                if (half * kRunKeys >= place.num_keys) continue;
                place.runs[half] = base + (size_t)*block * block_bytes + run * run_bytes;
                if (++run == runs_of_block) run = 0, ++block;
            }
        }
    }
    static void find_rows(const AttentionTask& task, int key, int count, PanelPlace& place) {
        place.are_runs = false;
        place.num_keys = count < kPanelOutputs ? count : kPanelOutputs;
        place.rows = PanelRows(task, 2, key, count);
        for (int half = 0; half < 2; ++half) place.runs[half] = place.rows.key[half * kRunKeys];
    }
};

// Fetches lines of tiles to come all along the work on others. The pool's blocks of one layer lie far apart, so the
// processor's own prefetcher starts anew at each, and a core asks for 16 lines at a time: who asks for more waits. So at each
// turn all panels have a line or two fetched, which the prefetcher follows as eight streams, and turns are spread over the
// work, as many as it takes to fetch everything: a line that is not asked for is waited for later.
class TileFetch {
  public:
    // Begins with `tile`, and goes on with `then` if there is one.
    void start(const TilePlaces& tile, const TilePlaces* then = nullptr) {
        const size_t half = kRunKeys * tile.row_bytes;
        for (int i = 0; i < tile.num_panels; ++i) {
            const PanelPlace& place = tile.panel[i];
            runs_[0][i] = place.runs[0];
            runs_[1][i] = place.runs[1] ? place.runs[1] - half : place.runs[0];
        }
        then_ = then;
        num_panels_ = tile.num_panels, num_heads_ = tile.num_heads;
        half_ = half, part_bytes_ = tile.run_bytes(), turn_bytes_ = tile.turn_bytes();
        head_bytes_ = tile.head_bytes, value_bytes_ = tile.value_bytes;
        last_turn_ = tile.num_panels ? tile.panel[tile.num_panels - 1].num_keys * tile.row_bytes - turn_bytes_ : 0;
        part_ = 0, parts_ = tile.num_panels ? 2 * tile.num_heads : 0;
        byte_ = distance_ = 0;
    }
    int turns_left() const {
        return (parts_ - part_) * (int)(part_bytes_ / turn_bytes_) - (int)(byte_ / turn_bytes_) + (then_ ? then_->turns() : 0);
    }
    // How many turns the work on `num_keys` keys (a multiple of 32) takes.
    void spread(int turns, int num_keys) {
        due_ = 0;
        period_ = turns ? (int)((int64_t)4 * num_heads_ * (half_ / 64) * num_keys / turns) : 1;
    }

    // Work on one head calls for as many turns for each line of a row as a panel has keys and values, if the tile has all keys.
    inline __attribute__((always_inline)) void turns(int count) {
        for (due_ += count * kTileKeys; due_ >= period_ && part_ < parts_; due_ -= period_) turn();
    }

  private:
    // Out of line: there are many places that call it, and it is no small part of what they do.
    __attribute__((noinline)) void turn() {
        const uint8_t* const* runs = runs_[byte_ >= half_];
        const size_t at = distance_ + byte_, last = distance_ + (byte_ < last_turn_ ? byte_ : last_turn_);
        static_assert(kTileKeys / kPanelOutputs == 8, "every panel has its case");
        switch (num_panels_) {
            case 8: fetch(runs[6] + at); [[fallthrough]];
            case 7: fetch(runs[5] + at); [[fallthrough]];
            case 6: fetch(runs[4] + at); [[fallthrough]];
            case 5: fetch(runs[3] + at); [[fallthrough]];
            case 4: fetch(runs[2] + at); [[fallthrough]];
            case 3: fetch(runs[1] + at); [[fallthrough]];
            case 2: fetch(runs[0] + at); [[fallthrough]];
            default: fetch(runs_[last_turn_ >= half_ && byte_ >= half_][num_panels_ - 1] + last);
        }
        if ((byte_ += turn_bytes_) < part_bytes_) return;
        byte_ = 0;
        distance_ = ++part_ == num_heads_ ? value_bytes_ : distance_ + head_bytes_;
        if (part_ == parts_ && then_) start(*then_);
    }
    void fetch(const uint8_t* from) const {
        __builtin_prefetch(from, 0, 2);
        __builtin_prefetch(from + turn_bytes_ - 64, 0, 2);
    }

    const TilePlaces* then_ = nullptr;
    int num_panels_ = 0, num_heads_ = 0;
    size_t half_ = 0;             // bytes of a run
    size_t part_bytes_ = 0;       // of each panel
    size_t turn_bytes_ = 64;
    size_t head_bytes_ = 0, value_bytes_ = 0;
    size_t last_turn_ = 0;        // its first byte in the last panel
    int part_ = 0, parts_ = 0;    // keys of each head, then values of each head
    int due_ = 0, period_ = 1;    // turns times the period
    size_t byte_ = 0, distance_ = 0;
    const uint8_t* runs_[2][kTileKeys / kPanelOutputs];  // of each panel; the second ones less `half_`
};

}  // namespace
