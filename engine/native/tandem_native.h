/* The C interface of the native engine. Plain C types, no Python and no torch: ctypes loads it.
 *
 * A model is created from its sizes, loaded matrix by matrix (the library packs and keeps its own copy), tied to a KV
 * pool that the caller owns, and then run step by step. One thread at a time may use a model. Functions that can fail
 * return 0 on success; tandem_last_error() says what went wrong on the calling thread.
 */
#ifndef TANDEM_NATIVE_H
#define TANDEM_NATIVE_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TANDEM_ABI_VERSION 12

#if defined(__GNUC__)
#define TANDEM_API __attribute__((visibility("default")))
#else
#define TANDEM_API
#endif

typedef struct TandemModel TandemModel;

typedef struct {
    int32_t vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim;
    int32_t sliding_window; /* 0: off */
    float rms_norm_eps;
    float attention_scale;
    int32_t num_threads; /* 1: everything on the calling thread */
} TandemModelSpec;

enum TandemTensor {
    TANDEM_EMBEDDING = 0,
    TANDEM_OUTPUT = 1, /* not loaded: the embedding is tied */
    TANDEM_FINAL_NORM = 2,
    TANDEM_ATTENTION_NORM = 3,
    TANDEM_MLP_NORM = 4,
    TANDEM_QUERY = 5,
    TANDEM_KEY = 6,
    TANDEM_VALUE = 7,
    TANDEM_ATTENTION_OUTPUT = 8,
    TANDEM_GATE = 9,
    TANDEM_UP = 10,
    TANDEM_DOWN = 11,
    TANDEM_QUERY_BIAS = 12,
    TANDEM_KEY_BIAS = 13,
    TANDEM_VALUE_BIAS = 14,
    TANDEM_QUERY_NORM = 15,
    TANDEM_KEY_NORM = 16
};

/* What the caller's bytes are (`source`) and how the library keeps a matrix (`format`, packed_matrix.h). Block formats
 * are GGUF's, row after row; a matrix in one takes the same blocks value for value, or floats, which are rounded;
 * one in a float format takes blocks too. */
enum TandemNumberFormat {
    TANDEM_F32 = 0,
    TANDEM_BF16 = 1,
    TANDEM_F16 = 2, /* source only */
    TANDEM_Q4_0 = 3,
    TANDEM_Q4_1 = 4,
    TANDEM_Q8_0 = 5,
    TANDEM_BF16_COMPRESSED = 6 /* kept only: BF16 without loss in 12 bits; where tandem_model_takes says so */
};

typedef struct {
    void* address;        /* [blocks, layers, 2, kv_heads, block_tokens, head_dim] */
    int64_t num_blocks;
    int32_t block_tokens;
    int32_t is_bfloat16;  /* else float32 */
} TandemKvPool;

/* engine.step.StepInput: B sequences with T new tokens, R rows whose logits are wanted. `inputs` replaces the token
 * ids' embeddings where it is not NULL. `taps` takes the residual stream after each of `tap_layers`, of the same R rows;
 * `most_likely` each one's token with the largest logit (of equal ones the first), -1 where a logit is no number or the
 * largest is not finite. */
typedef struct {
    const int32_t* token_ids;    /* [T] */
    const int32_t* positions;    /* [T] */
    const int64_t* slots;        /* [T] */
    const int32_t* query_starts; /* [B + 1] */
    const int32_t* context_lens; /* [B] */
    const int32_t* block_tables; /* [B, table_width] */
    const int32_t* logit_rows;   /* [R] */
    int32_t num_tokens, num_sequences, table_width, num_logit_rows;
    const float* inputs;         /* [T, hidden_size], or NULL */
    const int32_t* tap_layers;   /* [num_tap_layers], ascending */
    float* taps;                 /* [R, num_tap_layers, hidden_size] */
    int32_t num_tap_layers;
    const int32_t* tree_masks;   /* [T], or NULL: bit j of a row that is not 0: sees its sequence's j-th row of the step */
    int32_t* most_likely;        /* [R], or NULL */
    int32_t only_most_likely;    /* nobody reads the logits: they are not written */
} TandemStep;

/* Called on the stepping thread when a layer's KV of this step is in the pool. */
typedef void (*TandemLayerCallback)(int32_t layer);

typedef struct {
    int64_t packed_bytes;     /* weights as kept */
    int64_t reserved_bytes;   /* address space of the arena */
    int64_t huge_page_bytes;  /* of those, what the system was asked to put on huge pages and did not refuse */
    int64_t workspace_bytes;
    int64_t compressed_exceptions;   /* weights that BF16_COMPRESSED keeps beside their panel of 16 outputs */
    int64_t compressed_plain_panels; /* panels with too many of those, kept as BF16 */
    int32_t num_threads;
    int32_t matrices_beyond_half;    /* multiplied in float32 by kernels that multiply others in half precision */
} TandemModelStatus;

TANDEM_API int32_t tandem_abi_version(void);
TANDEM_API const char* tandem_last_error(void);

/* Instruction sets that are compiled in and that this processor runs, best first, separated by commas. */
TANDEM_API const char* tandem_usable_isas(void);

/* `isa` empty: the best one. `inverse_frequencies` [head_dim / 2] of the rotary embedding. NULL on failure. */
TANDEM_API TandemModel* tandem_model_create(const TandemModelSpec* spec, const float* inverse_frequencies, const char* isa);
TANDEM_API void tandem_model_destroy(TandemModel* model);
/* Whether matrices can be kept in `format` (TandemNumberFormat): 1 or 0. */
TANDEM_API int32_t tandem_model_takes(const TandemModel* model, int32_t format);
TANDEM_API int32_t tandem_model_load(TandemModel* model, int32_t tensor, int32_t layer, int32_t rows, int32_t columns,
                          int32_t source, int32_t format, const void* data);
TANDEM_API int32_t tandem_model_attach_pool(TandemModel* model, const TandemKvPool* pool);
TANDEM_API const char* tandem_model_isa(const TandemModel* model);
TANDEM_API void tandem_model_status(const TandemModel* model, TandemModelStatus* status);
/* The i-th memory range of packed weights; 0 when there is no such range. */
TANDEM_API int32_t tandem_model_memory(const TandemModel* model, int32_t index, uint64_t* address, uint64_t* num_bytes);

/* logits [R, logits_stride] float32, hidden [R, hidden_size] float32: the last hidden states, normed.
 * logits_stride is at least vocab_size rounded up to 16; the columns after vocab_size are undefined. */
TANDEM_API int32_t tandem_model_forward(TandemModel* model, const TandemStep* step, float* logits, int64_t logits_stride,
                             float* hidden, TandemLayerCallback layer_done);

/* A drafter of one decoder layer: a TandemModel of one layer whose vocabulary is the drafter's, and what stands around
 * it (draft_chain.h). The model must live longer and must not be used during a call. `embedding` stays the caller's. */
typedef struct TandemDrafter TandemDrafter;
typedef struct {
    int32_t hidden_size, num_taps, draft_vocab_size, target_vocab_size, block_tokens, width;
    int32_t format;             /* TandemNumberFormat of fuse_first and fuse_next as kept */
    float rms_norm_eps;
    const uint16_t* embedding;  /* [target_vocab_size, hidden_size] bfloat16 */
    const int32_t* vocabulary;  /* [draft_vocab_size]: the target's ids */
    const float* fuse_first;    /* [hidden_size, (num_taps + 1) * hidden_size] */
    const float* fuse_next;     /* [hidden_size, 2 * hidden_size] */
    const float* tap_norm;      /* [hidden_size]: a norm that every tap goes through before it is fused; NULL: none */
    const float* state_norm;    /* [hidden_size]: the same of the drafter's own states */
} TandemDraftSpec;

/* B sequences, each with rows of the target to read behind `num_cached` tokens of its blocks. A sequence goes on
 * guessing up to `num_guesses`, as long as the chain of its likeliest tokens holds with `min_reach`. */
typedef struct {
    const int32_t* row_starts;      /* [B + 1] */
    const float* taps;              /* [rows, num_taps, hidden_size] */
    const int32_t* token_ids;       /* [rows]: what each row chose */
    const int32_t* block_tables;    /* [B, table_width] */
    const int32_t* num_cached;      /* [B] */
    const int32_t* first_positions; /* [B] */
    const int32_t* num_guesses;     /* [B], at most max_levels */
    int32_t num_sequences, table_width, max_levels;
    float min_reach;
} TandemDraftBatch;

typedef struct {
    int32_t* token_ids;    /* [B, max_levels, width], the likeliest first */
    float* probabilities;  /* [B, max_levels, width] */
    int32_t* num_levels;   /* [B]: how many of them were written */
} TandemDraftLaws;

TANDEM_API TandemDrafter* tandem_drafter_create(TandemModel* layer, const TandemDraftSpec* spec);
TANDEM_API void tandem_drafter_destroy(TandemDrafter* drafter);
TANDEM_API int32_t tandem_drafter_propose(TandemDrafter* drafter, const TandemDraftBatch* batch, const TandemDraftLaws* laws);

/* One matrix by itself, for tests and benchmarks: packed from `rows` x `columns` of `source` into `format`. NULL on
 * failure. multiply: out [num_rows, out_stride] = x [num_rows, columns] * W^T, on the calling thread; out_stride is at
 * least `rows` rounded up to 16. */
typedef struct TandemMatrix TandemMatrix;
TANDEM_API TandemMatrix* tandem_matrix_create(const char* isa, int32_t rows, int32_t columns, int32_t source,
                                              int32_t format, const void* data);
TANDEM_API int64_t tandem_matrix_bytes(const TandemMatrix* matrix);
TANDEM_API int32_t tandem_matrix_multiply(const TandemMatrix* matrix, const float* x, int32_t num_rows, float* out,
                                          int64_t out_stride);
/* One row [columns] as the matrix holds it. */
TANDEM_API int32_t tandem_matrix_row(const TandemMatrix* matrix, int32_t row, float* out);
TANDEM_API void tandem_matrix_destroy(TandemMatrix* matrix);

/* A thread of the lowest priority that makes `num_bytes` at `memory` resident, from the first on, as far as `reach` says:
 * to `now_bytes` at once, to `later_bytes` (no less) while nobody computes, as `make_way` says. Contents stay. NULL on
 * failure. Neither ever waits, and both may be called from any thread; `destroy` comes before the memory is unmapped. */
typedef struct TandemPages TandemPages;
TANDEM_API TandemPages* tandem_pages_create(void* memory, int64_t num_bytes);
TANDEM_API void tandem_pages_reach(TandemPages* pages, int64_t now_bytes, int64_t later_bytes);
TANDEM_API void tandem_pages_make_way(TandemPages* pages, int32_t is_computing);
TANDEM_API int64_t tandem_pages_touched(const TandemPages* pages);
TANDEM_API void tandem_pages_destroy(TandemPages* pages);

/* The tokens that `engine.sampler.gumbel_argmax` chooses, for rows of `scaled` [rows, stride] float32 whose largest value
 * is 0 at peak_ids[row]. seeds, choice_indices, positions [rows]: whose noise. `isa` empty: the best one. */
TANDEM_API int32_t tandem_gumbel_argmax(const char* isa, const float* scaled, int64_t stride, int32_t rows,
                                        int32_t vocab_size, const int64_t* peak_ids, const uint64_t* seeds,
                                        const uint64_t* choice_indices, const uint64_t* positions, int64_t* token_ids);

/* Rows of `logits` [rows, stride] float32 become (logits - peak) / temperature, and -inf where `engine.logit_filters`
 * drops a token. peaks, temperatures, top_k, top_p, min_p [rows]; a row's largest logit is its peak. */
TANDEM_API int32_t tandem_scale_and_filter(const char* isa, float* logits, int64_t stride, int32_t rows,
                                           int32_t vocab_size, const float* peaks, const float* temperatures,
                                           const int32_t* top_k, const double* top_p, const double* min_p);

/* What the machine can do at best, for benchmarks, with the instructions of `isa` (empty: the best one). The first reads
 * the bytes once and returns some sum of them; the second multiplies `iterations` times in registers, in the way that
 * matrices of `format` are multiplied, and returns the number of operations. Both return -1 for an unknown `isa`. */
TANDEM_API int64_t tandem_read_once(const char* isa, const void* data, int64_t num_bytes);
TANDEM_API double tandem_multiply_in_registers(const char* isa, int32_t format, int32_t iterations);

#ifdef __cplusplus
}
#endif
#endif
