// A trained drafter of one decoder layer (EAGLE, multi-token prediction): all guesses of all sequences in one call.
//
//   taps of a row, embedding of the token it chose ─ fuse_first ─┐
//   own state, embedding of the guess behind it ──── fuse_next ──┴─> decoder of one layer ─> law of the next guess
//
// Taps, states and embeddings are fused over their root mean square; what was trained behind a norm with weights goes
// through that norm before (tap_norm, state_norm).
//
// Every level is one step of the layer for all sequences that still guess, so its weights are read once a level however
// many these are. Between two steps of the target every line is cold: that is why nothing here goes back to Python.
#pragma once
#include <cstdint>
#include <vector>

#include "arena.h"
#include "decoder.h"
#include "tandem_native.h"

namespace tandem {

class DraftChain {
  public:
    // `layer` outlives this, and nobody else uses it during a call. Throws std::invalid_argument for sizes that differ.
    DraftChain(Decoder& layer, const TandemDraftSpec& spec, const KernelTable& kernels);

    // Throws std::invalid_argument for arrays that point outside the model or the pool.
    void propose(const TandemDraftBatch& batch, const TandemDraftLaws& laws);

  private:
    PackedMatrix packed(const float* data, int inputs);
    void check(const TandemDraftBatch& batch) const;
    void read_rows(const TandemDraftBatch& batch);
    void read_guesses(const TandemDraftBatch& batch, const TandemDraftLaws& laws, int level);
    void embed(int32_t token_id, float* out);
    void scale(const float* x, int rows, const std::vector<float>& norm, float* out, size_t out_stride);
    void multiply(const PackedMatrix& matrix, int rows);
    void forward(const TandemDraftBatch& batch);
    float write_law(float* logits, int32_t* token_ids, float* probabilities);

    Decoder& layer_;
    const KernelTable kernels_;
    const TandemDraftSpec spec_;
    const size_t hidden_, logits_stride_;
    std::vector<int32_t> vocabulary_;
    std::vector<float> tap_norm_, state_norm_;  // empty: none
    Arena arena_;
    PackedMatrix fuse_first_, fuse_next_;

    // Of the step at hand: sequence i of it is sequence active_[i] of the batch.
    std::vector<int> active_;
    std::vector<int32_t> query_starts_, context_lens_, positions_, logit_rows_, block_tables_;
    std::vector<int64_t> slots_;
    std::vector<float> reach_;  // of each sequence of the batch: how sure its chain is so far
    std::vector<float> ones_, joined_, inputs_, states_, logits_, normed_, embedded_;
    std::vector<uint8_t> scratch_, expanded_;  // activations and weights of a product
};

}  // namespace tandem
