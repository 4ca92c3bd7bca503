// Weights of panels as AMX tiles, plain or from 12 bits (compressed_panel.h): one after another while a panel streams by, or
// a part of a pair of panels for many rows, made while the part before it is multiplied.
#pragma once
#include "kernels/amx_tiles.h"
#include "kernels/compressed_groups.h"
#include "kernels/tile_activations.h"

namespace {

using tandem::PackedMatrix;

constexpr int kTileGroups = kTileInputs / kGroupInputs;
constexpr int kMostPartSteps = 18;  // of 32 inputs: 36 KB of a pair in a first cache of 48 KB
constexpr size_t kStreamedAhead = 1024;  // bytes of each of up to four panels, into the first cache
constexpr size_t kPartAhead = 24 * 1024;  // bytes of panels, into the second cache

// Lines of a streamed panel, fetched ahead into the first cache; the second one's own prefetcher follows. Behind the panel
// come the first lines of the one that this stream reads next.
class StreamAhead {
  public:
    // `streams`: neighbouring panels that are read side by side
    StreamAhead(const PackedMatrix& w, int panel, int streams)
        : at_(w.panel(panel) + kStreamedAhead), end_(w.panel(panel + 1)), jump_((size_t)(streams - 1) * w.panel_bytes) {
        pass_end();
    }
    inline __attribute__((always_inline)) void fetch(size_t num_bytes) {
        for (size_t line = 0; line < num_bytes; line += kRowBytes) __builtin_prefetch(at_ + line, 0, 3);
        at_ += num_bytes;
        pass_end();
    }

  private:
    inline __attribute__((always_inline)) void pass_end() {
        if (at_ < end_) return;
        at_ += jump_;
        jump_ = 0;
    }
    const uint8_t *at_, *end_;
    size_t jump_;
};

// `steps` tiles of a panel and of its neighbour from `step` on.
struct PartPlace {
    int panel, step, steps;
    bool both;  // the neighbour is wanted
};
// Their tiles, one behind the other; without a neighbour `second` is `first`.
struct Part {
    const uint8_t *first, *second;
};

// The tiles of a panel, one after another.
struct PlainTiles {
    const uint8_t* at;
    StreamAhead ahead;
    PlainTiles(const PackedMatrix& w, int panel, int streams) : at(w.panel(panel)), ahead(w, panel, streams) {}
    inline __attribute__((always_inline)) const uint8_t* next() {
        ahead.fetch(kTileBytes);
        at += kTileBytes;
        return at - kTileBytes;
    }

    // A part where it lies. Its lines come into the second cache a few at a time: more would wait for each other.
    class PartAhead {
      public:
        PartAhead() = default;
        PartAhead(const PackedMatrix& w, const PartPlace& place, int turns, uint8_t*) {
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
};

// Of 12 bits: each becomes BF16 a few tiles before it is used, so that its stores are done when it is loaded.
struct CompressedTiles {
    static constexpr int kLead = 2, kRing = 4;
    alignas(64) uint8_t ring[kRing][kTileBytes];
    const CompressedHeader& header;
    const int steps;
    const I table;
    const uint8_t* at;
    StreamAhead ahead;
    const HighByteException *exception, *end;
    int decoded = 0, used = 0;

    CompressedTiles(const PackedMatrix& w, int panel, int streams)
        : header(*(const CompressedHeader*)w.panel(panel)),
          steps(w.k_padded / kTileInputs),
          table(load_table(header)),
          at(w.panel(panel) + sizeof(CompressedHeader)),
          ahead(w, panel, streams),
          exception(header.exceptions),
          end(exception + header.num_exceptions) {}

    inline __attribute__((always_inline)) void decode() {
        uint8_t* to = ring[decoded % kRing];
        if (__builtin_expect(header.plain != nullptr, 0)) {
            __builtin_memcpy(to, header.plain + decoded * kTileBytes, kTileBytes);
        } else {
#pragma GCC unroll 4
            for (int group = 0; group < kTileGroups; ++group) {
                ahead.fetch(kGroupBytes);
                decode_groups(at + group * kGroupBytes, 1, table, to + group * kPlainGroupBytes);
            }
            exception = put_exceptions(exception, end, decoded * kTileGroups, kTileGroups, to);
        }
        at += kTileGroups * kGroupBytes;
        ++decoded;
    }
    inline __attribute__((always_inline)) const uint8_t* next() {
        while (decoded < steps && decoded <= used + kLead) decode();
        return ring[used++ % kRing];
    }

    // A part becomes BF16 in `scratch`, groups of the first panel and then of the second, a few at each turn. What has too
    // many exceptions stays where it lies.
    class PartAhead {
      public:
        PartAhead() = default;
        PartAhead(const PackedMatrix& w, const PartPlace& place, int turns, uint8_t* scratch)
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
};

}  // namespace
