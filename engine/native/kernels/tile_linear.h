// Linear layers with BF16 weights on AMX tiles, weights plain or in 12 bits. Every output is one chain of tile products in
// order of k, whichever way below computes it: a row's result does not depend on the batch.
//
// Few rows: panels are read once, tile by tile, some of them side by side. Many rows: a part of two panels stays in the first
// cache while blocks of 32 rows are multiplied with it. Tile products leave the vector units idle, so the next tiles or the next
// part are made and the sums of the block before are worked on meanwhile, a little at each step.
#pragma once
#include "kernels/panel_parts.h"
#include "kernels/panel_streams.h"
#include "kernels/tile_gates.h"
#include "kernels/tile_products.h"

namespace {

constexpr int kMostStreams = 4;               // panels side by side, for up to 16 rows; six are not faster
constexpr int kShortLinearTiles = 7;          // of up to 16 rows have as many: sums and activations, all but the weights
constexpr int kStoringSteps = 2;              // after which the sums of the block before have reached the cache
constexpr size_t kTileCachedBytes = 1 << 20;  // of activations, in a second cache of 2 MB

// Sums go to rows of floats, and stay there.
struct RowSink {
    float* out;
    size_t out_stride;
    int first_panel;
    bool add;

    float* sums(int row, int panel) const { return out + (size_t)row * out_stride + (size_t)(panel - first_panel) * kPanelOutputs; }
    size_t stride() const { return out_stride; }
    bool adds() const { return add; }
    static constexpr size_t kNextPair = kPairFloats;
    void finished(int, int, int) {}
    void turn() {}
};

template <class Weights>
struct TileLinear {
    static size_t scratch_bytes(int rows, int k_padded) {
        return parts_bytes(rows) + GateSink::sums_floats(rows, blocks_are_whole(rows, k_padded)) * sizeof(float);
    }

    static void multiply(const void* packed, int rows, const PackedMatrix& w, int first_panel, int last_panel, float* out,
                         size_t out_stride, bool add, void* scratch) {
        RowSink sink = {out, out_stride, first_panel, add};
        run(packed, rows, w, first_panel, last_panel, sink, scratch);
    }

    static void multiply_gated(const void* packed, int rows, const PackedMatrix& w, int first_pair, int last_pair,
                               int gated_k_padded, void* gated, void* scratch) {
        float* sums = (float*)((uint8_t*)scratch + parts_bytes(rows));
        GateSink sink({nullptr, rows, gated_k_padded / kTileInputs}, (uint8_t*)gated, w.panels / 2, sums,
                      blocks_are_whole(rows, w.k_padded));
        run(packed, rows, w, 2 * first_pair, 2 * last_pair, sink, scratch);
        sink.flush();
    }

  private:
    using PartAhead = typename Weights::Part;
    static constexpr size_t kPartBytes = 2 * kMostPartSteps * kTileBytes;

    // Two parts: one in use, one in the making.
    static size_t parts_bytes(int rows) { return rows > kBlockRows ? 2 * kPartBytes : 0; }
    static bool blocks_are_whole(int rows, int k_padded) {
        return rows <= kBlockRows || k_padded / kTileInputs <= kMostPartSteps;
    }

    template <class Sink>
    static void run(const void* packed, int rows, const PackedMatrix& w, int first_panel, int last_panel, Sink& sink,
                    void* scratch) {
        const TileActivations a = {(const uint8_t*)packed, rows, w.k_padded / kTileInputs};
        if (rows <= kBlockRows)
            multiply_few(a, w, first_panel, last_panel, sink);
        else
            multiply_many(a, w, first_panel, last_panel, sink, (uint8_t*)scratch);
    }

    template <class Sink>
    static void multiply_few(const TileActivations& a, const PackedMatrix& w, int first_panel, int last_panel, Sink& sink) {
        if (a.rows <= kTileRows) {
            [[maybe_unused]] const TileSession session(TileConfiguration(kShortLinearTiles, a.rows));
            stream_panels<1>(a, w, first_panel, last_panel, sink);
        } else {
            [[maybe_unused]] const TileSession session(kTileRows, a.count(kTileRows));
            stream_panels<2>(a, w, first_panel, last_panel, sink);
        }
    }
    template <int RT, class Sink>
    static void stream_panels(const TileActivations& a, const PackedMatrix& w, int panel, int last_panel, Sink& shared_sink) {
        Sink sink = shared_sink;
        if constexpr (RT == 1) panel = stream<RT, kMostStreams>(a, w, panel, last_panel, sink);
        panel = stream<RT, 2>(a, w, panel, last_panel, sink);
        stream<RT, 1>(a, w, panel, last_panel, sink);
        shared_sink = sink;
    }

    // All rows, RT tiles, times PT panels that come from memory, as often as there are so many. Returns the panel behind them.
    template <int RT, int PT, class Sink>
    static inline __attribute__((always_inline)) int stream(const TileActivations& a, const PackedMatrix& w, int panel, int last_panel, Sink& sink) {
        if (panel + PT > last_panel) return panel;
        typename Weights::template Streams<PT> weights(w, panel, last_panel);
        const uint8_t *upper = a.tile(0, 0), *lower = RT == 2 ? a.tile(kTileRows, 0) : nullptr;
        const size_t upper_bytes = a.count(0) * kRowBytes, lower_bytes = RT == 2 ? a.count(kTileRows) * kRowBytes : 0;
        const size_t next_pair = RT == 2 ? kTileRows * sink.stride() : Sink::kNextPair;
        for (; panel + PT <= last_panel; panel += PT) {
            float* sums = sink.sums(0, panel);
            start_sums<RT, PT>(sums, next_pair, sink.stride(), sink.adds());
            for (int step = 0; step < a.steps; ++step) {
                tile_load<RT == 1 ? 6 : 4>(upper + step * upper_bytes, kRowBytes);
                if constexpr (RT == 2) tile_load<5>(lower + step * lower_bytes, kRowBytes);
                add_streamed<RT, PT>(weights);
                if (step >= kStoringSteps) sink.turn();
            }
            store_sums<RT, PT>(sums, next_pair, sink.stride());
            sink.finished(0, panel, (PT + 1) / 2);
        }
        return panel;
    }
    template <int RT, int PT, int K = 0>
    static inline __attribute__((always_inline)) void add_streamed(typename Weights::template Streams<PT>& weights) {
        if constexpr (RT == 1) {
            tile_load<7>(weights.template next<K>(), kRowBytes);
            tile_dot<K, 6, 7>();
        } else {
            tile_load<6 + K>(weights.template next<K>(), kRowBytes);
            tile_dot<K, 4, 6 + K>();
            tile_dot<2 + K, 5, 6 + K>();
        }
        if constexpr (K + 1 < PT) add_streamed<RT, PT, K + 1>(weights);
    }

    // Rows in groups whose activations stay in the second cache.
    template <class Sink>
    static void multiply_many(const TileActivations& a, const PackedMatrix& w, int first_panel, int last_panel, Sink& sink,
                              uint8_t* scratch) {
        const int blocks = (a.rows + kBlockRows - 1) / kBlockRows;
        const int fit = (int)(kTileCachedBytes / ((size_t)w.k_padded * 2 * kBlockRows));
        const int groups = fit > 1 ? (blocks + fit - 1) / fit : blocks, group = (blocks + groups - 1) / groups * kBlockRows;
        const int parts = (a.steps + kMostPartSteps - 1) / kMostPartSteps, part_steps = (a.steps + parts - 1) / parts;
        const auto place = [&](int panel, int step) {
            return PartPlace{panel, step, step + part_steps <= a.steps ? part_steps : a.steps - step, panel + 1 < last_panel};
        };
        int slot = 0;
        PartAhead ahead(w, place(first_panel, 0), 1, scratch);
        for (int first = 0; first < a.rows; first += group) {
            const int last = first + group < a.rows ? first + group : a.rows;
            for (int panel = first_panel; panel < last_panel; panel += 2)
                for (int step = 0; step < a.steps; step += part_steps) {
                    const PartPlace here = place(panel, step);
                    const Part part = ahead.finish();
                    slot = 1 - slot;
                    const int turns = (last - first + kBlockRows - 1) / kBlockRows * here.steps;
                    uint8_t* next = scratch + slot * kPartBytes;
                    if (step + part_steps < a.steps)
                        ahead = PartAhead(w, place(panel, step + part_steps), turns, next);
                    else if (panel + 2 < last_panel)
                        ahead = PartAhead(w, place(panel + 2, 0), turns, next);
                    else if (last < a.rows)
                        ahead = PartAhead(w, place(first_panel, 0), turns, next);
                    else
                        ahead = PartAhead();
                    multiply_rows(a, first, last, here, part, ahead, sink);
                }
        }
    }

    // What goes on beside products of a part.
    template <class Sink>
    struct Beside {
        PartAhead ahead;
        Sink sink;
    };

    // Rows [first, last) times a part.
    template <class Sink>
    static void multiply_rows(const TileActivations& a, int first, int last, const PartPlace& place, const Part& part,
                              PartAhead& ahead, Sink& sink) {
        using Product = void (*)(const TileActivations&, int, const PartPlace&, const Part&, Beside<Sink>&);
        const int whole = first + (last - first) / kBlockRows * kBlockRows, rest = last - whole;
        const bool is_last_part = place.step + place.steps == a.steps;
        Beside<Sink> beside = {ahead, sink};
        const auto multiply = [&](Product product, int row, int end) {
            for (; row < end; row += kBlockRows) {
                product(a, row, place, part, beside);
                if (is_last_part) beside.sink.finished(row, place.panel, 1);
            }
        };
        if (whole > first) {
            [[maybe_unused]] const TileSession session;
            multiply(place.both ? &multiply_part<2, 2, Sink> : &multiply_part<2, 1, Sink>, first, whole);
        }
        if (rest > 0) {
            [[maybe_unused]] const TileSession session(a.count(whole), rest > kTileRows ? rest - kTileRows : rest);
            const Product two = place.both ? &multiply_part<2, 2, Sink> : &multiply_part<2, 1, Sink>;
            const Product one = place.both ? &multiply_part<1, 2, Sink> : &multiply_part<1, 1, Sink>;
            multiply(rest > kTileRows ? two : one, whole, last);
        }
        ahead = beside.ahead;
        sink = beside.sink;
    }

    // RT tiles of rows times a part that stays in the first cache; the activations pass by it.
    template <int RT, int PT, class Sink>
    static void multiply_part(const TileActivations& a, int row, const PartPlace& place, const Part& part,
                              Beside<Sink>& shared_beside) {
        Beside<Sink> beside = shared_beside;
        const uint8_t *upper = a.tile(row, place.step), *lower = RT == 2 ? a.tile(row + kTileRows, place.step) : nullptr;
        const size_t upper_bytes = a.count(row) * kRowBytes, lower_bytes = RT == 2 ? a.count(row + kTileRows) * kRowBytes : 0;
        float* sums = beside.sink.sums(row, place.panel);
        start_sums<RT, PT>(sums, kTileRows * beside.sink.stride(), beside.sink.stride(), beside.sink.adds() || place.step > 0);
        for (int i = 0; i < place.steps; ++i) {
            tile_load_passing<4>(upper + i * upper_bytes, kRowBytes);
            tile_load<6>(part.first + i * kTileBytes, kRowBytes);
            if constexpr (PT == 2) tile_load<7>(part.second + i * kTileBytes, kRowBytes);
            if constexpr (RT == 2) tile_load_passing<5>(lower + i * lower_bytes, kRowBytes);
            add_products<RT, PT>();
            beside.ahead.turn();
            if (i >= kStoringSteps) beside.sink.turn();
        }
        store_sums<RT, PT>(sums, kTileRows * beside.sink.stride(), beside.sink.stride());
        shared_beside = beside;
    }
};

struct PlainWeights {
    template <int N>
    using Streams = PlainStreams<N>;
    using Part = PlainPart;
};
struct CompressedWeights {
    template <int N>
    using Streams = CompressedStreams<N>;
    using Part = CompressedPart;
};

template <class Weights>
constexpr LinearKernels kTileLinear = {&TileActivations::bytes, &TileActivations::run_rows, &TileActivations::pack,
                                       &TileLinear<Weights>::scratch_bytes, &TileLinear<Weights>::multiply, &TileLinear<Weights>::multiply_gated};

}  // namespace
