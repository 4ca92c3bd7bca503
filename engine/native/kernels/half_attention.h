// Attention of bfloat16 keys and values in half precision: scores of half_scores.h, weights times values of half_weights.h.
#pragma once
#include "kernels/half_scores.h"
#include "kernels/half_weights.h"

namespace {

struct HalfProducts {
    using Activation = uint32_t;  // pairs of float16
    struct Session {};
    static Session session(int) { return {}; }
    static constexpr int kInputs = 1;  // weights lie where their scores were, and leave room behind tiles of 16 bits
    static constexpr int kBlockRows = 36;

    static RowBlocks blocks(int rows) { return RowBlocks::of_size(rows, kBlockRows); }
    static int state_rows(int rows) { return rows; }
    static int summed_rows(int rows) { return rows; }
    static void pack_queries(const float* x, int rows, int head_dim, Activation* q) { pack_half_queries(x, rows, head_dim, q); }
    static void scores(const Activation* q, int rows, const uint8_t* keys, int head_dim, int num_keys, float* out) {
        score_half_tile(q, rows, keys, head_dim, num_keys, out);
    }
    static void weigh(const Activation* p, int rows, const uint8_t* values, int head_dim, int num_keys, float* out) {
        weigh_tile(p, rows, values, head_dim, num_keys, out);
    }
};
static_assert(HalfProducts::kBlockRows % kScoredRows == 0 && HalfProducts::kBlockRows % kWeighedRows == 0, "whole tiles");

template <>
struct Traits<HalfProducts> {
    static constexpr bool kScalesQueries = true;
    static constexpr bool kBf16Values = true;
    static constexpr float kValueScale = ::kValueScale;
    static void store_weights(uint32_t* p, int key, const F (&weights)[2]) {
        store_weight_pairs(p + key, weights[0]);
        store_weight_pairs(p + key + kWidth, weights[1]);
    }
    static F raise(F maximum, F of_tile) { return vmax(maximum, of_tile); }
    static void restore_dims(float*, int) {}
};

template <>
struct Arrangement<HalfProducts> {
    static constexpr bool kWidens = false;
    static void keys(const uint8_t* const* rows, int head_dim, int key, uint8_t* tile) {
        arrange_half_keys(rows, head_dim, key, tile);
    }
    static void values(const uint8_t* const* rows, int head_dim, int key, uint8_t* tile) {
        arrange_half_values(rows, head_dim, key, tile);
    }
};

struct FewRowsHalf {
    static void score(const uint32_t* q, int rows, const uint8_t* const* keys, int head_dim, float* scores) {
        kFewRowsHalfScores.entry[rows](q, head_dim, keys, scores);
    }
    static void weigh(const uint32_t* p, int rows, const uint8_t* const* values, int head_dim, int num_keys, float* out) {
        weigh_few_rows(p, rows, values, head_dim, num_keys, out);
    }
    static void finish(float*, size_t) {}
};

}  // namespace
