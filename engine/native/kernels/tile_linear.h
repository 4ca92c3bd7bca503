// Linear layers with BF16 weights on AMX tiles, weights plain or in 12 bits (compressed_panel.h). Every output is one chain of
// tile products in order of k, whichever way below computes it: a row's result does not depend on the batch.
//
// Few rows: two panels are read once, tile by tile; weights of 12 bits become a tile in the first cache on the way. Many
// rows: a part of two panels stays in the first cache while blocks of 32 rows are multiplied with it, and the next pair's
// bytes are fetched meanwhile.
#pragma once
#include "kernels/compressed_groups.h"
#include "kernels/dense_linear.h"
#include "kernels/tile_products.h"

namespace {

constexpr int kTileInputs = 32;
constexpr int kBlockRows = 2 * kTileRows;     // of one product of four tiles; so many are few
constexpr int kPairFloats = 2 * kPanelOutputs;
constexpr int kTileGroups = kTileInputs / kGroupInputs;
constexpr int kMostPartSteps = 18;            // of 32 inputs: 36 KB of a pair in a first cache of 48 KB
constexpr size_t kTileCachedBytes = 1 << 20;  // of activations, in a second cache of 2 MB
constexpr size_t kStreamedAhead = 2048;       // bytes of a panel

// Packed activations: [tile of up to 16 rows][32 inputs][rows][64 bytes].
struct TileActivations {
    const uint8_t* data;
    int rows, steps;

    static size_t bytes(int rows, int k_padded) { return (size_t)rows * (size_t)k_padded * 2; }

    static void pack(const float* x, size_t stride, int rows, int k, int k_padded, void* packed) {
        uint8_t* to = (uint8_t*)packed;
        for (int first = 0; first < rows; first += kTileRows) {
            const int count = first + kTileRows <= rows ? kTileRows : rows - first;
            const size_t step_bytes = count * kRowBytes;
            for (int m = 0; m < count; ++m) {
                const float* from = x + (size_t)(first + m) * stride;
                uint8_t* line = to + m * kRowBytes;
                int input = 0;
                for (; input + kTileInputs <= k; input += kTileInputs, line += step_bytes)
                    vstore_bf16_pair((uint16_t*)line, vload(from + input), vload(from + input + kWidth));
                for (; input < k_padded; input += kTileInputs, line += step_bytes)
                    round_row(from + input, k - input, kTileInputs, (uint16_t*)line);
            }
            to += step_bytes * (size_t)(k_padded / kTileInputs);
        }
    }

    int count(int row) const { return row + kTileRows <= rows ? kTileRows : rows - row; }
    // The tile of rows from `row` (a multiple of 16) on, from `step` on.
    const uint8_t* tile(int row, int step) const {
        return data + ((size_t)row * steps + (size_t)step * count(row)) * kRowBytes;
    }
};

// Lines of a streamed panel, fetched ahead into the first cache; the second one's own prefetcher follows.
inline __attribute__((always_inline)) void fetch_lines(const uint8_t* at, size_t num_bytes) {
    for (size_t line = 0; line < num_bytes; line += kRowBytes) __builtin_prefetch(at + line + kStreamedAhead, 0, 3);
}

// The tiles of a panel, one after another.
struct PlainTiles {
    const uint8_t* at;
    PlainTiles(const PackedMatrix& w, int panel) : at(w.panel(panel)) {}
    inline __attribute__((always_inline)) const uint8_t* next() {
        fetch_lines(at, kTileBytes);
        at += kTileBytes;
        return at - kTileBytes;
    }
    // Tiles of a part of a panel: where they are, or in `scratch`.
    static const uint8_t* part(const PackedMatrix& w, int panel, int first_step, int, uint8_t*) {
        return w.panel(panel) + first_step * kTileBytes;
    }
};

// Of 12 bits: each becomes BF16 a few tiles before it is used, so that its stores are done when it is loaded.
struct CompressedTiles {
    static constexpr int kLead = 2, kRing = 4;
    alignas(64) uint8_t ring[kRing][kTileBytes];
    const CompressedHeader& header;
    const int steps;
    const I table;
    const uint8_t* at;
    const HighByteException *exception, *end;
    int decoded = 0, used = 0;

    CompressedTiles(const PackedMatrix& w, int panel)
        : header(*(const CompressedHeader*)w.panel(panel)),
          steps(w.k_padded / kTileInputs),
          table(load_table(header)),
          at(w.panel(panel) + sizeof(CompressedHeader)),
          exception(header.exceptions),
          end(exception + header.num_exceptions) {}

    inline __attribute__((always_inline)) void decode() {
        uint8_t* to = ring[decoded % kRing];
        fetch_lines(at, kTileGroups * kGroupBytes);
        if (__builtin_expect(header.plain != nullptr, 0)) {
            __builtin_memcpy(to, header.plain + decoded * kTileBytes, kTileBytes);
        } else {
            decode_groups(at, kTileGroups, table, to);
            exception = put_exceptions(exception, end, decoded * kTileGroups, kTileGroups, to);
        }
        at += kTileGroups * kGroupBytes;
        ++decoded;
    }
    inline __attribute__((always_inline)) const uint8_t* next() {
        while (decoded < steps && decoded <= used + kLead) decode();
        return ring[used++ % kRing];
    }
    static const uint8_t* part(const PackedMatrix& w, int panel, int first_step, int steps, uint8_t* scratch) {
        const CompressedHeader& header = *(const CompressedHeader*)w.panel(panel);
        if (header.plain) return header.plain + first_step * kTileBytes;
        const int first = first_step * kTileGroups, groups = steps * kTileGroups;
        decode_groups(w.panel(panel) + sizeof header + first * kGroupBytes, groups, load_table(header), scratch);
        const HighByteException *exception = header.exceptions, *end = exception + header.num_exceptions;
        while (exception < end && exception->group < first) ++exception;
        put_exceptions(exception, end, first, groups, scratch);
        return scratch;
    }
};

// Fetches the next pair's bytes into the second cache, an equal share at each step of this pair's products: more at a time
// would wait for each other.
struct NextPair {
    const uint8_t *at, *end;
    size_t share;
    NextPair(const PackedMatrix& w, int panel, int steps)
        : at(w.panel(panel < w.panels ? panel : w.panels)),
          end(w.panel(panel + 2 < w.panels ? panel + 2 : w.panels)),
          share(((size_t)(end - at) / (size_t)steps + kRowBytes) / kRowBytes * kRowBytes) {}
    inline __attribute__((always_inline)) void fetch_some() {
        for (size_t byte = 0; byte < share && at < end; byte += kRowBytes, at += kRowBytes) __builtin_prefetch(at, 0, 2);
    }
};

template <class Tiles>
struct TileLinear {
    static size_t scratch_bytes(int rows, int) {
        return rows > kBlockRows ? 2 * kMostPartSteps * kTileBytes : 0;
    }

    static void multiply(const void* packed, int rows, const PackedMatrix& w, int first_panel, int last_panel, float* out,
                         size_t out_stride, bool add, void* scratch) {
        const TileActivations a = {(const uint8_t*)packed, rows, w.k_padded / kTileInputs};
        if (rows <= kBlockRows) return multiply_few(a, w, first_panel, last_panel, out, out_stride, add);
        const int blocks = (rows + kBlockRows - 1) / kBlockRows, fit = (int)(kTileCachedBytes / ((size_t)w.k_padded * 2 * kBlockRows));
        const int groups = fit > 1 ? (blocks + fit - 1) / fit : blocks, group = (blocks + groups - 1) / groups * kBlockRows;
        for (int first = 0; first < rows; first += group)
            for (int p = first_panel; p < last_panel; p += 2)
                multiply_pair(a, first, first + group < rows ? first + group : rows, w, p, last_panel,
                              out + (size_t)(p - first_panel) * kPanelOutputs, out_stride, add, (uint8_t*)scratch);
    }

  private:
    static void multiply_few(const TileActivations& a, const PackedMatrix& w, int first_panel, int last_panel, float* out,
                             size_t out_stride, bool add) {
        const int upper = a.count(0), lower = a.rows > kTileRows ? a.count(kTileRows) : upper;
        [[maybe_unused]] const TileSession session(upper, lower);
        const auto pair = a.rows > kTileRows ? &stream<2, 2> : &stream<1, 2>;
        const auto single = a.rows > kTileRows ? &stream<2, 1> : &stream<1, 1>;
        for (int p = first_panel; p < last_panel; p += 2, out += kPairFloats)
            (p + 1 < last_panel ? pair : single)(a, w, p, out, out_stride, add);
    }

    // All rows, RT tiles, times PT panels that come from memory.
    template <int RT, int PT>
    static void stream(const TileActivations& a, const PackedMatrix& w, int panel, float* out, size_t out_stride, bool add) {
        Tiles first(w, panel), second(w, panel + PT - 1);
        const uint8_t *upper = a.tile(0, 0), *lower = RT == 2 ? a.tile(kTileRows, 0) : nullptr;
        const size_t upper_bytes = a.count(0) * kRowBytes, lower_bytes = RT == 2 ? a.count(kTileRows) * kRowBytes : 0;
        start_sums<RT, PT>(out, out_stride, add);
        for (int step = 0; step < a.steps; ++step) {
            tile_load<6>(first.next(), kRowBytes);
            if constexpr (PT == 2) tile_load<7>(second.next(), kRowBytes);
            tile_load<4>(upper + step * upper_bytes, kRowBytes);
            if constexpr (RT == 2) tile_load<5>(lower + step * lower_bytes, kRowBytes);
            add_products<RT, PT>();
        }
        store_sums<RT, PT>(out, out_stride);
    }

    // A part of two panels.
    struct Pair {
        const uint8_t *first, *second;
    };
    using Product = void (*)(const TileActivations&, int, int, int, const Pair&, NextPair&, float*, size_t, bool);

    // Rows [first, last) times a pair, part after part.
    static void multiply_pair(const TileActivations& a, int first, int last, const PackedMatrix& w, int panel, int last_panel,
                              float* out, size_t out_stride, bool add, uint8_t* scratch) {
        const bool both = panel + 1 < last_panel;
        const int parts = (a.steps + kMostPartSteps - 1) / kMostPartSteps, part_steps = (a.steps + parts - 1) / parts;
        const int whole = first + (last - first) / kBlockRows * kBlockRows, rest = last - whole;
        NextPair next(w, panel + 2, a.steps * ((last - first + kBlockRows - 1) / kBlockRows));
        for (int step = 0; step < a.steps; step += part_steps) {
            const int steps = step + part_steps <= a.steps ? part_steps : a.steps - step;
            const uint8_t* upper = Tiles::part(w, panel, step, steps, scratch);
            const Pair pair = {upper, both ? Tiles::part(w, panel + 1, step, steps, scratch + kMostPartSteps * kTileBytes) : upper};
            const auto multiply = [&](Product product, int row, int end) {
                for (; row < end; row += kBlockRows)
                    product(a, row, step, steps, pair, next, out + (size_t)row * out_stride, out_stride, add || step > 0);
            };
            if (whole > first) {
                [[maybe_unused]] const TileSession session;
                multiply(both ? &multiply_part<2, 2> : &multiply_part<2, 1>, first, whole);
            }
            if (rest > 0) {
                [[maybe_unused]] const TileSession session(a.count(whole), rest > kTileRows ? rest - kTileRows : rest);
                const Product two = both ? &multiply_part<2, 2> : &multiply_part<2, 1>;
                const Product one = both ? &multiply_part<1, 2> : &multiply_part<1, 1>;
                multiply(rest > kTileRows ? two : one, whole, last);
            }
        }
    }

    // RT tiles of rows times a part that stays in the first cache; the activations pass by it.
    template <int RT, int PT>
    static void multiply_part(const TileActivations& a, int row, int step, int steps, const Pair& pair, NextPair& next_pair,
                              float* out, size_t out_stride, bool go_on) {
        NextPair next = next_pair;
        const uint8_t *upper = a.tile(row, step), *lower = RT == 2 ? a.tile(row + kTileRows, step) : nullptr;
        const size_t upper_bytes = a.count(row) * kRowBytes, lower_bytes = RT == 2 ? a.count(row + kTileRows) * kRowBytes : 0;
        start_sums<RT, PT>(out, out_stride, go_on);
        for (int i = 0; i < steps; ++i) {
            next.fetch_some();
            tile_load_passing<4>(upper + i * upper_bytes, kRowBytes);
            tile_load<6>(pair.first + i * kTileBytes, kRowBytes);
            if constexpr (PT == 2) tile_load<7>(pair.second + i * kTileBytes, kRowBytes);
            if constexpr (RT == 2) tile_load_passing<5>(lower + i * lower_bytes, kRowBytes);
            add_products<RT, PT>();
        }
        store_sums<RT, PT>(out, out_stride);
        next_pair = next;
    }
};

template <class Tiles>
constexpr LinearKernels kTileLinear = {&TileActivations::bytes, &TileActivations::pack, &TileLinear<Tiles>::scratch_bytes,
                                       &TileLinear<Tiles>::multiply};

}  // namespace
