// Paged attention in place, with online softmax: decode, verification of drafts and chunked prefill are one kernel.
//
// One task: consecutive query tokens of one sequence and some KV heads. Rows are (token, head) pairs, so each key and
// value is read once for the whole group and for all tokens. Keys come in tiles of 128 at fixed positions of the
// sequence: a row's result does not depend on which other rows, chunks or batches it is computed with.
//
//   for each tile, block after block as the pool has them:
//        keys   -> [16 keys a panel][dims]
//        values -> [16 dims a panel][keys]
//   for each KV head and block of rows:
//        scores = Q K^T, P = 2^(scores - maximum), O = O * correction + P V
//
// Bytes past the end of a sequence are never read: rows of zeros stand for them.
#pragma once
#include "kernels/attention_layout.h"
#include "kernels/attention_softmax.h"
#include "kernels/dense_linear.h"
#include "kernels/elementwise.h"
#include "kernels/few_rows_path.h"
#ifdef TANDEM_TILES
#include "kernels/few_rows_tiles.h"
#endif
#if defined(__AVX512BF16__) && !defined(TANDEM_TILES) && !defined(TANDEM_BF16_BY_HALF)
#include "kernels/few_rows_attention.h"
#endif
#ifdef TANDEM_BF16_BY_FMA
#include "kernels/float_attention.h"
#endif
#ifdef TANDEM_BF16_BY_HALF
#include "kernels/half_attention.h"
#endif

namespace {

// The two products on vector registers.
template <class Dot>
struct RegisterProducts {
    using Activation = typename Dot::Activation;
    using Function = void (*)(const Activation*, const uint8_t*, int, int, float*);
    struct Session {};  // what must live while products for so many rows are made
    static Session session(int) { return {}; }
    static constexpr int kInputs = Dot::kInputs;
    static constexpr int kBlockRows = kPairRows;
    static constexpr int kKeySteps = kTileKeys / kInputs;

    static RowBlocks blocks(int rows) { return RowBlocks(rows, kBlockRows); }
    static int state_rows(int rows) { return rows; }   // that scratch memory has room for
    static int summed_rows(int rows) { return rows; }  // of O
    static void pack_queries(const float* x, int rows, int head_dim, Activation* q) {
        pack_rows(x, head_dim, blocks(rows), rows, head_dim, head_dim, q);
    }

    // scores[MR, num_keys] = q K^T
    struct Scores {
        template <int MR>
        static void run(const Activation* q, const uint8_t* keys, int head_dim, int num_keys, float* scores) {
            const int steps = head_dim / kInputs;
            for (int key = 0; key < num_keys; key += 32)
                multiply_tile<Dot, MR, 2, Fetch::kNone, false>(q, MR, 1, keys + (size_t)key / 16 * steps * kRowBytes,
                                                        steps * kRowBytes, steps, scores + key, kTileKeys, false);
        }
        template <int MR>
        static constexpr Function function() {
            return &run<MR>;
        }
    };
    // out[MR, head_dim] += p V
    struct Weighted {
        template <int MR>
        static void run(const Activation* p, const uint8_t* values, int head_dim, int num_keys, float* out) {
            for (int dim = 0; dim < head_dim; dim += 32)
                multiply_tile<Dot, MR, 2, Fetch::kNone, true>(p, 1, kKeySteps, values + (size_t)dim / 16 * kKeySteps * kRowBytes,
                                                       kKeySteps * kRowBytes, num_keys / kInputs, out + dim, head_dim,
                                                       false);
        }
        template <int MR>
        static constexpr Function function() {
            return &run<MR>;
        }
    };
    static constexpr auto kScores = by_rows<Scores>(std::make_index_sequence<kBlockRows>());
    static constexpr auto kWeighted = by_rows<Weighted>(std::make_index_sequence<kBlockRows>());

    static void scores(const Activation* q, int rows, const uint8_t* keys, int head_dim, int num_keys, float* out) {
        kScores.entry[rows](q, keys, head_dim, num_keys, out);
    }
    static void weigh(const Activation* p, int rows, const uint8_t* values, int head_dim, int num_keys, float* out) {
        kWeighted.entry[rows](p, values, head_dim, num_keys, out);
    }
};

// What multiplies bfloat16 and float32 keys and values.
#if defined(TANDEM_TILES)
using Bf16Products = TileProducts;
#elif defined(TANDEM_BF16_BY_HALF)
using Bf16Products = HalfProducts;
#elif defined(TANDEM_BF16_BY_FMA)
using Bf16Products = FloatProducts<true>;
#else
using Bf16Products = RegisterProducts<DotPairs>;
#endif
#ifdef TANDEM_BF16_BY_FMA
using F32Products = FloatProducts<false>;
#else
using F32Products = RegisterProducts<DotF32>;
#endif

#ifdef TANDEM_BF16_BY_HALF
template <>
struct FewRowsPath<HalfProducts> : FewRowsOf<HalfProducts, FewRowsHalf> {};
#elif defined(__AVX512BF16__) && !defined(TANDEM_TILES)
template <>
struct FewRowsPath<Bf16Products> : FewRowsOf<Bf16Products, FewRowsPairs> {};
#endif

template <class Products>
inline void attend_block(const AttentionTask& task, const Scratch<Products>& s, const BlockTile& tile) {
    const int head_dim = task.kv.head_dim;
    const size_t first = (size_t)tile.first_row * head_dim;
    Products::scores(s.q + first / Products::kInputs, tile.num_rows, s.keys, head_dim, tile.num_keys, s.scores);
    softmax_block(task, s, tile);
    Products::weigh(s.p, tile.num_rows, s.values, head_dim, tile.num_keys, s.out + first);
}

// Rows of a long task lie a token's width apart in buffers of the second cache's size or more: fetching them ahead is worth a
// hundredth of a prompt of 2,048 tokens.
constexpr int kRowsAhead = 6;

template <int kWrite>
inline void prefetch_floats(const float* from, int count) {
    for (int i = 0; i < count; i += kRowBytes / 4) __builtin_prefetch(from + i, kWrite, 3);
}

template <class Products>
inline void start_rows(const AttentionTask& task, const Scratch<Products>& s, int head, int rows) {
    const int head_dim = task.kv.head_dim;
    const float* first = task.q + (size_t)head * task.group * head_dim;
    [[maybe_unused]] const F scale = vset1(task.scale * kLog2E);
    between_products<Products>();
    const auto place = [&](int row) { return first + row / task.group * task.q_stride + row % task.group * head_dim; };
    for (int row = 0; row < rows; ++row) {
        const float* q = place(row);
        if (row + kRowsAhead < rows) prefetch_floats<0>(place(row + kRowsAhead), head_dim);
        for (int i = 0; i < head_dim; i += kWidth) {
            const F x = vload(q + i);
            vstore(s.out + (size_t)row * head_dim + i, Traits<Products>::kScalesQueries ? vmul(x, scale) : x);
        }
        s.maximum[row] = kLowest;
        vstore(s.sum + (size_t)row * kWidth, vzero());
    }
    Products::pack_queries(s.out, rows, head_dim, s.q);
    for (size_t i = 0; i < (size_t)Products::summed_rows(rows) * head_dim; i += kWidth) vstore(s.out + i, vzero());
}

template <class Products>
inline void finish_rows(const AttentionTask& task, const Scratch<Products>& s, int head, int rows) {
    const int head_dim = task.kv.head_dim;
    float* first = task.out + (size_t)head * task.group * head_dim;
    between_products<Products>();
    const auto place = [&](int row) { return first + row / task.group * task.out_stride + row % task.group * head_dim; };
    for (int row = 0; row < rows; ++row) {
        float* out = place(row);
        if (row + kRowsAhead < rows) prefetch_floats<1>(place(row + kRowsAhead), head_dim);
        Traits<Products>::restore_dims(s.out + (size_t)row * head_dim, head_dim);
        const F inverse = vset1(1.0f / Traits<Products>::kValueScale / vsum(vload(s.sum + (size_t)row * kWidth)));
        for (int i = 0; i < head_dim; i += kWidth)
            vstore(out + i, vmul(vload(s.out + (size_t)row * head_dim + i), inverse));
    }
}

// All rows of one KV head that see keys of the arranged tile.
template <class Products>
inline void attend_tile(const AttentionTask& task, const Scratch<Products>& s, int key, int num_keys, int rows) {
    const RowBlocks blocks = Products::blocks(rows);
    for (int row = 0; row < rows; row += blocks.size) {
        const int mr = row + blocks.size <= rows ? blocks.size : rows - row;
        const int seen = task.first_position + (row + mr - 1) / task.group + 1 - key;  // keys of the last row
        if (seen <= 0) continue;
        if (task.window && key + kTileKeys <= least_position(task, row / task.group) - task.window + 1) continue;
        const int wanted = (seen + 31) / 32 * 32;
        attend_block(task, s, {row, mr, key, wanted < num_keys ? wanted : num_keys});
    }
}

template <class Products>
inline void attend_arranged(const AttentionTask& task, const AttentionTask* next, const Scratch<Products>& s, int rows) {
    const int end_key = task.first_position + task.num_queries;
    for (int key = first_tile(task); key < end_key; key += kTileKeys) {
        const int num_keys = keys_of_tile(key, end_key);
        arrange_tile(task, s, key, end_key, num_keys);
        for (int head = 0; head < task.num_kv_heads; ++head)
            attend_tile(task, s.head(head, rows, task.kv.head_dim), key, num_keys, rows);
    }
    if (next) prefetch_start(*next);
}

template <class Products>
inline void attend(const AttentionTask& task, const AttentionTask* next, void* scratch) {
    const int head_dim = task.kv.head_dim, rows = task.num_queries * task.group;
    [[maybe_unused]] const typename Products::Session session = Products::session(rows);
    Scratch<Products> s;
    Scratch<Products>::carve((uint8_t*)scratch, rows, task.num_kv_heads, head_dim, &s);
    for (int head = 0; head < task.num_kv_heads; ++head)
        start_rows(task, s.head(head, rows, head_dim), head, rows);
    if (FewRowsPath<Products>::takes(rows))
        FewRowsPath<Products>::attend_tiles(task, next, s, rows);
    else
        attend_arranged(task, next, s, rows);
    for (int head = 0; head < task.num_kv_heads; ++head)
        finish_rows(task, s.head(head, rows, head_dim), head, rows);
}

// Of one task, unless one token alone has more. Each task arranges its keys anew; on AMX tiles that is much beside the
// products, so a whole chunk of 512 tokens may be one.
#ifdef TANDEM_TILES
constexpr int kMostAttentionRows = 1536;
#else
constexpr int kMostAttentionRows = 384;
#endif

inline size_t attention_scratch_bytes(int rows, int num_kv_heads, int head_dim) {
    const size_t pairs = Scratch<Bf16Products>::carve(nullptr, rows, num_kv_heads, head_dim, nullptr);
    const size_t floats = Scratch<F32Products>::carve(nullptr, rows, num_kv_heads, head_dim, nullptr);
    return pairs > floats ? pairs : floats;
}

inline void attention(const AttentionTask& task, const AttentionTask* next, void* scratch) {
#ifdef __AVX512BF16__
    if (task.kv.type == KvType::kBf16) return attend<Bf16Products>(task, next, scratch);
#endif
    attend<F32Products>(task, next, scratch);
}

}  // namespace
