// Weights of panels for few rows of activations: N neighbouring panels stream by side by side, a tile of each at every step,
// plain or made from 12 bits (compressed_panel.h); behind them come the next N.
//
// A core gets the most from memory when lines of all panels are asked for in turns, a few beside each group that is decoded:
// four panels of which a tile is worked off at a time, one after the other, take 1.07 times as long.
#pragma once
#include "kernels/amx_tiles.h"
#include "kernels/compressed_groups.h"
#include "kernels/tile_activations.h"

namespace {

using tandem::PackedMatrix;

constexpr int kStepsAhead = 2;  // 1.5 KB of each panel, into the first cache; the second one's own prefetcher follows

// Lines of N streams. Behind a panel come the first lines of the one that its stream reads next.
template <int N, size_t kStepBytes>  // of a stream
class StreamsAhead {
  public:
    StreamsAhead(const PackedMatrix& w, int panel, size_t header_bytes)
        : at_(w.panel(panel) + header_bytes),
          panel_bytes_(w.panel_bytes),
          header_bytes_(header_bytes),
          steps_(w.k_padded / kTileInputs),
          left_(steps_) {
        for (int step = 0; step < kStepsAhead; ++step) {
            for (int part = 0; part < N * kTileGroups; ++part) fetch(part);
            next_step();
        }
    }
    // A step's lines are fetched in as many parts as it has groups.
    inline __attribute__((always_inline)) void fetch(int part) {
        constexpr int kLines = kStepBytes / kRowBytes / kTileGroups;
#pragma GCC unroll 4
        for (int line = part * kLines; line < (part + 1) * kLines; ++line)
            __builtin_prefetch(at_ + line % N * panel_bytes_ + line / N * kRowBytes, 0, 3);
    }
    inline __attribute__((always_inline)) void next_step() {
        at_ += kStepBytes;
        if (--left_ == 0) next_panels();
    }

  private:
    void next_panels() {
        at_ += (N - 1) * panel_bytes_;
        if (header_bytes_)
            for (int i = 0; i < N; ++i) __builtin_prefetch(at_ + i * panel_bytes_, 0, 3);
        at_ += header_bytes_;
        left_ = steps_;
    }

    const uint8_t* at_;
    const size_t panel_bytes_, header_bytes_;
    const int steps_;
    int left_;  // steps of these panels
};

// Tiles as they lie in memory.
template <int N>
class PlainStreams {
  public:
    // From `panel` on as many whole times N panels as end at `last_panel` or before it.
    PlainStreams(const PackedMatrix& w, int panel, int /*last_panel*/)
        : at_(w.panel(panel)), panel_bytes_(w.panel_bytes), steps_(w.k_padded / kTileInputs), left_(steps_), ahead_(w, panel, 0) {}

    // The tile of the K-th panel; K goes from 0 to N - 1 in turns.
    template <int K>
    inline __attribute__((always_inline)) const uint8_t* next() {
#pragma GCC unroll 4
        for (int part = K * kTileGroups; part < (K + 1) * kTileGroups; ++part) ahead_.fetch(part);
        const uint8_t* tile = at_ + K * panel_bytes_;
        if constexpr (K == N - 1) {
            ahead_.next_step();
            at_ += kTileBytes;
            if (--left_ == 0) at_ += (N - 1) * panel_bytes_, left_ = steps_;
        }
        return tile;
    }

  private:
    const uint8_t* at_;
    const size_t panel_bytes_;
    const int steps_;
    int left_;  // steps of these panels
    StreamsAhead<N, kTileBytes> ahead_;
};

// Of 12 bits: a step's tiles become BF16 while those of the step before are multiplied, so that their stores are done when they
// are loaded.
template <int N>
class CompressedStreams {
  public:
    CompressedStreams(const PackedMatrix& w, int panel, int last_panel)
        : panel_(w.panel(panel)),
          panel_bytes_(w.panel_bytes),
          steps_(w.k_padded / kTileInputs),
          left_((last_panel - panel) / N * steps_),
          ahead_(w, panel, sizeof(CompressedHeader)) {
        start_panels();
        for (int part = 0; part < N * kTileGroups; ++part) decode(part);
        end_step();
        turn_ = 1;
    }
    template <int K>
    inline __attribute__((always_inline)) const uint8_t* next() {
        const uint8_t* tile = tiles_[1 - turn_][K];
        if (__builtin_expect(left_ > 0, 1)) {
#pragma GCC unroll 4
            for (int part = K * kTileGroups; part < (K + 1) * kTileGroups; ++part) decode(part);
            if constexpr (K == N - 1) end_step();
        }
        if constexpr (K == N - 1) turn_ = 1 - turn_;
        return tile;
    }

  private:
    static constexpr size_t kStepBytes = kTileGroups * kGroupBytes;

    const CompressedHeader& header(int i) const { return *(const CompressedHeader*)(panel_ + i * panel_bytes_); }
    void start_panels() {
        has_plain_ = false;
        for (int i = 0; i < N; ++i) {
            table_[i] = load_table(header(i));
            exception_[i] = header(i).exceptions;
            end_[i] = exception_[i] + header(i).num_exceptions;
            has_plain_ |= header(i).plain != nullptr;
        }
        at_ = panel_ + sizeof(CompressedHeader);
        step_ = 0;
    }
    // A step's groups, the first one of each panel, then the second ones.
    inline __attribute__((always_inline)) void decode(int part) {
        const int i = part % N, group = part / N;
        ahead_.fetch(part);
        decode_groups(at_ + i * panel_bytes_ + group * kGroupBytes, 1, table_[i], tiles_[turn_][i] + group * kPlainGroupBytes);
    }
    // All groups of a step are decoded; what is missing are exceptions.
    inline __attribute__((always_inline)) void end_step() {
        for (int i = 0; i < N; ++i)
            exception_[i] = put_exceptions(exception_[i], end_[i], step_ * kTileGroups, kTileGroups, tiles_[turn_][i]);
        if (__builtin_expect(has_plain_, 0))
            for (int i = 0; i < N; ++i)
                if (header(i).plain) __builtin_memcpy(tiles_[turn_][i], header(i).plain + step_ * kTileBytes, kTileBytes);
        ahead_.next_step();
        at_ += kStepBytes;
        ++step_;
        if (--left_ > 0 && step_ == steps_) {
            panel_ += N * panel_bytes_;
            start_panels();
        }
    }

    alignas(64) uint8_t tiles_[2][N][kTileBytes];  // one step in use, one in the making
    I table_[N];
    const HighByteException *exception_[N], *end_[N];
    const uint8_t* panel_;  // the first of these N
    const uint8_t* at_;     // its next step
    const size_t panel_bytes_;
    const int steps_;
    int left_;  // steps of all panels that are not decoded
    int step_ = 0, turn_ = 0;
    bool has_plain_ = false;
    StreamsAhead<N, kStepBytes> ahead_;
};

}  // namespace
