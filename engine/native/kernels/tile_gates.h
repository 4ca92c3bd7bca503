// silu(gate) * up on the way from the sums of a pair of panels to the activations of the next layer, a row of two tiles at
// each step of later products: vectors are idle there.
#pragma once
#include "kernels/elementwise.h"
#include "kernels/tile_activations.h"

namespace {

// gate / (1 + e^-gate), for what is rounded to bfloat16 afterwards: the estimated inverse is within 2^-14 of it.
inline F silu_for_bf16(F gate) {
    return vmul(gate, _mm512_rcp14_ps(vadd(vset1(1.0f), vexp2_for_bf16(vmul(gate, vset1(-kLog2E))))));
}

// Where sums of gates and ups go, and what becomes of them.
class GateSink {
  public:
    // `sums`: of all rows, or of two blocks of them where a block is finished before the next one begins.
    GateSink(const TileActivations& gated, uint8_t* to, int num_pairs, float* sums, bool blocks_are_whole)
        : gated_(gated), to_(to), num_pairs_(num_pairs), sums_(sums), blocks_are_whole_(blocks_are_whole) {}

    static size_t sums_floats(int rows, bool blocks_are_whole) {
        return (blocks_are_whole ? 2 : (size_t)(rows + kBlockRows - 1) / kBlockRows) * kBlockFloats;
    }
    // Where a block's sums go; none of those that were there is left to be put.
    float* sums(int row, int) {
        if (!blocks_are_whole_ && row == pending_row_) flush();
        return place(row);
    }
    size_t stride() const { return kPairFloats; }
    bool adds() const { return false; }
    // From the sums of 16 rows for a pair of panels to those for the next pair.
    static constexpr size_t kNextPair = (size_t)kTileRows * kPairFloats;

    // The sums of a block of rows for a pair of panels are there, or of 16 rows for two pairs.
    void finished(int row, int panel, int pairs) {
        flush();
        const float* from = place(row);
        pending_row_ = row;
        halves_[0] = half(from, row, panel / 2);
        halves_[1] = {};
        if (pairs == 2)
            halves_[1] = half(from + kNextPair, row, panel / 2 + 1);
        else if (row + kTileRows < gated_.rows)
            halves_[1] = half(from + kNextPair, row + kTileRows, panel / 2);
        slot_ = 1 - slot_;
    }
    inline __attribute__((always_inline)) void turn() {
        put_line(halves_[0]);
        put_line(halves_[1]);
    }
    void flush() {
        while (halves_[0].lines > 0) turn();
    }

  private:
    static constexpr size_t kBlockFloats = (size_t)kBlockRows * kPairFloats;

    float* place(int row) const { return sums_ + (size_t)(blocks_are_whole_ ? slot_ : row / kBlockRows) * kBlockFloats; }

    // Rows of a tile for a pair of panels: where the next one's sums are, where it goes, how many are left.
    struct Half {
        const float* from = nullptr;
        uint8_t* to = nullptr;
        int lines = 0;
        bool ends_in_zeros = false;  // there is no pair for the other half of the line
    };
    Half half(const float* from, int row, int pair) const {
        return {from, to_ + gated_.offset(row, pair / 2) + (pair % 2 ? kRowBytes / 2 : 0), gated_.count(row),
                pair % 2 == 0 && pair + 1 == num_pairs_};
    }
    static inline __attribute__((always_inline)) void put_line(Half& half) {
        if (half.lines <= 0) return;
        const F value = vmul(silu_for_bf16(vload(half.from)), vload(half.from + kPanelOutputs));
        vstore_bf16((uint16_t*)half.to, value);
        if (__builtin_expect(half.ends_in_zeros, 0)) vstore_bf16((uint16_t*)half.to + kPanelOutputs, vzero());
        half.from += kPairFloats;
        half.to += kRowBytes;
        --half.lines;
    }

    TileActivations gated_;
    uint8_t* to_;
    int num_pairs_;
    float* sums_;
    bool blocks_are_whole_;
    int slot_ = 0, pending_row_ = -1;
    Half halves_[2];  // being put, of the block from pending_row_ on
};

}  // namespace
