// Weights of panels for many rows of activations: a part of a pair of panels as AMX tiles, plain or made from 12 bits
// (compressed_panel.h) while the part before it is multiplied.
#pragma once
#include "kernels/amx_tiles.h"
#include "kernels/compressed_groups.h"
#include "kernels/tile_activations.h"

namespace {

using tandem::PackedMatrix;

constexpr int kMostPartSteps = 18;  // of 32 inputs: 36 KB of a pair in a first cache of 48 KB
constexpr size_t kPartAhead = 24 * 1024;  // bytes of panels, into the second cache

// `steps` tiles of a panel and of its neighbour from `step` on.
struct PartPlace {
    int panel, step, steps;
    bool both;  // the neighbour is wanted
};
// Their tiles, one behind the other; without a neighbour `second` is `first`.
struct Part {
    const uint8_t *first, *second;
};

// A part where it lies. Its lines come into the second cache a few at a time: more would wait for each other.
class PlainPart {
  public:
    PlainPart() = default;
    PlainPart(const PackedMatrix& w, const PartPlace& place, int turns, uint8_t*) {
        const size_t first = (size_t)place.step * kTileBytes;
        part_.first = w.panel(place.panel) + first;
        part_.second = w.panel(place.panel + place.both) + first;
        left_ = place.steps * kTileBytes;
        share_ = left_ / (size_t)turns / kRowBytes * kRowBytes + kRowBytes;
    }
    inline __attribute__((always_inline)) void turn() {
        if (!left_) return;
        const size_t count = share_ < left_ ? share_ : left_;
        for (size_t byte = left_ - count; byte < left_; byte += kRowBytes) {
            __builtin_prefetch(part_.first + byte, 0, 2);
            __builtin_prefetch(part_.second + byte, 0, 2);
        }
        left_ -= count;
    }
    Part finish() { return part_; }

  private:
    Part part_ = {};
    size_t left_ = 0, share_ = 0;  // bytes of each panel
};

// A part becomes BF16 in `scratch`, groups of the first panel and then of the second, a few at each turn. What has too
// many exceptions stays where it lies.
class CompressedPart {
  public:
    CompressedPart() = default;
    CompressedPart(const PackedMatrix& w, const PartPlace& place, int turns, uint8_t* scratch)
        : first_group_(place.step * kTileGroups), groups_(place.steps * kTileGroups) {
        for (int i = 0; i <= place.both; ++i, scratch += kMostPartSteps * kTileBytes) {
            Panel& panel = panels_[num_panels_];
            panel.header = (const CompressedHeader*)w.panel(place.panel + i);
            panel.to = scratch;
            tiles_[i] = panel.header->plain ? panel.header->plain + (size_t)place.step * kTileBytes : scratch;
            num_panels_ += !panel.header->plain;
        }
        if (!place.both) tiles_[1] = tiles_[0];
        share_ = (num_panels_ * groups_ + turns - 1) / turns;
        start_panel();
    }
    inline __attribute__((always_inline)) void turn() { decode(share_); }
    Part finish() {
        decode(2 * groups_);
        for (int i = 0; i < num_panels_; ++i) put_exceptions_of(panels_[i]);
        return {tiles_[0], tiles_[1]};
    }

  private:
    struct Panel {
        const CompressedHeader* header;
        uint8_t* to;
    };
    void start_panel() {
        left_ = panel_ < num_panels_ ? groups_ : 0;
        if (!left_) return;
        header_ = panels_[panel_].header;
        from_ = (const uint8_t*)(header_ + 1) + (size_t)first_group_ * kGroupBytes;
        to_ = panels_[panel_++].to;
    }
    inline __attribute__((always_inline)) void decode(int count) {
        for (; count > 0 && left_ > 0; --count) {
            for (size_t line = 0; line < kGroupBytes; line += kRowBytes) __builtin_prefetch(from_ + line + kPartAhead, 0, 2);
            decode_groups(from_, 1, load_table(*header_), to_);
            from_ += kGroupBytes;
            to_ += kPlainGroupBytes;
            if (--left_ == 0) start_panel();
        }
    }
    void put_exceptions_of(const Panel& panel) const {
        const HighByteException *at = panel.header->exceptions, *end = at + panel.header->num_exceptions;
        while (at < end && at->group < first_group_) ++at;
        put_exceptions(at, end, first_group_, groups_, panel.to);
    }

    int first_group_ = 0, groups_ = 0, num_panels_ = 0, share_ = 0;
    Panel panels_[2] = {};
    const uint8_t* tiles_[2] = {};
    int panel_ = 0, left_ = 0;  // the panel after the one being decoded, and its groups that are not yet
    const CompressedHeader* header_ = nullptr;
    const uint8_t* from_ = nullptr;
    uint8_t* to_ = nullptr;
};

}  // namespace
