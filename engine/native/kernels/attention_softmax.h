// Scores of a block of rows become weights: hidden keys, maxima, powers of two, and the correction of what was summed before.
#pragma once
#include "kernels/attention_layout.h"
#include "kernels/elementwise.h"

namespace {

// One block of rows against the tile that is arranged in the scratch.
struct BlockTile {
    int first_row;
    int num_rows;
    int first_key;
    int num_keys;  // a multiple of 32; keys past a row's position are masked
};

// Hides keys outside [low, high) from a row.
inline void mask_row(float* scores, int num_keys, int low, int high) {
    for (int i = 0; i < low; ++i) scores[i] = kNegativeInfinity;
    for (int i = high > 0 ? high : 0; i < num_keys; ++i) scores[i] = kNegativeInfinity;
}

// Hides the keys of the step's other branches from a row of a tree: the key of row j lies at root + j.
inline void hide_branches(float* scores, int num_keys, int root, uint32_t mask) {
    for (int j = root < 0 ? -root : 0; j < 32 && root + j < num_keys; ++j)
        if (!(mask >> j & 1u)) scores[root + j] = kNegativeInfinity;
}

// Turns a row's scores into weights 2^(score * scale + shift) and adds these to `sum`.
template <class Products, int kKeys>
inline F weigh_keys(const float* scores, F scale, F shift, F sum, typename Products::Activation* p) {
    F weights[2];
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; i += kWidth) {
        const F exponent = Traits<Products>::kScalesQueries ? vadd(vload(scores + i), shift) : vfma(vload(scores + i), scale, shift);
        const F weight = Traits<Products>::kBf16Values ? vexp2_for_bf16(exponent) : vexp2(exponent);
        sum = vadd(sum, weight);
        weights[i / kWidth % 2] = weight;
        if (i / kWidth % 2) Traits<Products>::store_weights(p, i - kWidth, weights);
    }
    return sum;
}

template <int kKeys>
inline F largest_of(const float* scores) {
    F highest = vload(scores);
#pragma GCC unroll 8
    for (int i = kWidth; i < kKeys; i += kWidth) highest = vmax(highest, vload(scores + i));
    return highest;
}

// Weights of up to kWidth rows from their masked scores; corrects what was summed before. Maxima stand in lanes: reducing
// one row after the other would take as many instructions as weighing 32 keys.
template <class Products, int kMostRows>
inline void softmax_rows(const AttentionTask& task, const Scratch<Products>& s, float* scores, typename Products::Activation* p,
                         int first_row, int count, int num_keys) {
    const int head_dim = task.kv.head_dim;
    F highest[kMostRows];
    for (int m = 0; m < kMostRows; ++m) {
        const float* row = scores + (m < count ? m : 0) * kTileKeys;
        if (num_keys == kTileKeys) {
            highest[m] = largest_of<kTileKeys>(row);
        } else {
            highest[m] = largest_of<32>(row);
            for (int key = 32; key < num_keys; key += 32) highest[m] = vmax(highest[m], largest_of<32>(row + key));
        }
    }
    const F scale = vset1(task.scale * kLog2E), of_tile = vmaxima(highest);
    const F before = vload(s.maximum + first_row);
    const F maximum = Traits<Products>::raise(before, Traits<Products>::kScalesQueries ? of_tile : vmul(of_tile, scale));
    float maxima[kWidth], shifts[kWidth], corrections[kWidth];
    vstore(maxima, maximum);
    vstore(shifts, vsub(vzero(), maximum));
    vstore(corrections, vexp2(vsub(before, maximum)));
    copy_words((uint32_t*)s.maximum + first_row, (const uint32_t*)maxima, count);
    for (int m = 0; m < count; ++m, scores += kTileKeys, p += kTileKeys / Products::kInputs) {
        float *sum_lanes = s.sum + (size_t)(first_row + m) * kWidth, *out = s.out + (size_t)(first_row + m) * head_dim;
        // Since the last tile other rows' parts of O have taken its place in the first cache.
        for (int i = 0; i < head_dim; i += 16) __builtin_prefetch(out + i, 1, 3);
        F sum = vload(sum_lanes);
        if (corrections[m] != 1.0f) {
            const F correction = vset1(corrections[m]);
            sum = vmul(sum, correction);
            for (int i = 0; i < head_dim; i += kWidth) vstore(out + i, vmul(vload(out + i), correction));
        }
        const F shift = vset1(shifts[m]);
        if (num_keys == kTileKeys) {
            sum = weigh_keys<Products, kTileKeys>(scores, scale, shift, sum, p);
        } else {
            for (int key = 0; key < num_keys; key += 32)
                sum = weigh_keys<Products, 32>(scores + key, scale, shift, sum, p + key / Products::kInputs);
        }
        vstore(sum_lanes, sum);
    }
}

// Hides from each row of a block what it must not see.
template <class Products>
inline void mask_block(const AttentionTask& task, const Scratch<Products>& s, const BlockTile& tile) {
    int query = tile.first_row / task.group, member = tile.first_row % task.group;
    if (!task.tree_masks && !task.window && task.first_position + query + 1 >= tile.first_key + tile.num_keys) return;
    float* scores = s.scores;
    for (int m = 0; m < tile.num_rows; ++m, scores += kTileKeys) {
        const int key = task.first_position + query, end = key + 1 - tile.first_key;
        int position = key;
        if (task.tree_masks) {
            const int row = task.first_row + query;
            position = task.tree_positions[row];
            hide_branches(scores, tile.num_keys, key - row - tile.first_key, (uint32_t)task.tree_masks[row]);
        }
        const int start = task.window ? position - task.window + 1 - tile.first_key : 0;
        const int high = end < tile.num_keys ? end : tile.num_keys;
        const int low = start > 0 ? (start < tile.num_keys ? start : tile.num_keys) : 0;
        mask_row(scores, tile.num_keys, low, high);
        if (++member == task.group) member = 0, ++query;
    }
}

// Scores of a block of rows become weights, masked for each row.
template <class Products>
inline void softmax_block(const AttentionTask& task, const Scratch<Products>& s, const BlockTile& tile) {
    mask_block(task, s, tile);
    for (int m = 0; m < tile.num_rows;) {
        const int left = tile.num_rows - m;
        float* scores = s.scores + m * kTileKeys;
        typename Products::Activation* p = s.p + m * (kTileKeys / Products::kInputs);
        if (left <= 4) {
            softmax_rows<Products, 4>(task, s, scores, p, tile.first_row + m, left, tile.num_keys);
            break;
        }
        const int count = left < kWidth ? left : kWidth;
        softmax_rows<Products, kWidth>(task, s, scores, p, tile.first_row + m, count, tile.num_keys);
        m += count;
    }
}

}  // namespace
