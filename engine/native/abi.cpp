// The C functions of tandem_native.h: exceptions become return codes and a message.
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_features.h"
#include "decoder.h"
#include "draft_chain.h"
#include "filtering.h"
#include "pages_ahead.h"
#include "tandem_native.h"

struct TandemModel {
    tandem::Decoder decoder;
};

struct TandemDrafter {
    tandem::DraftChain chain;
};

struct TandemMatrix {
    tandem::KernelTable kernels;
    tandem::Arena arena;
    tandem::PackedMatrix packed;

    const tandem::LinearKernels& linear() const { return kernels.linear_of(packed); }
};

struct TandemPages {
    tandem::PagesAhead ahead;
};

namespace {

thread_local std::string last_error;

template <class Function>
int32_t guarded(const Function& function) {
    try {
        function();
        return 0;
    } catch (const std::exception& error) {
        last_error = error.what();
        return 1;
    }
}

tandem::KernelTable kernels_for(const std::string& isa) {
    for (const tandem::Variant& variant : tandem::usable_variants())
        if (isa.empty() || isa == variant.name) return variant.table();
    throw std::invalid_argument("this machine cannot run the instruction set '" + isa + "'");
}

}  // namespace

extern "C" {

int32_t tandem_abi_version(void) { return TANDEM_ABI_VERSION; }

const char* tandem_last_error(void) { return last_error.c_str(); }

const char* tandem_usable_isas(void) {
    static const std::string names = [] {
        std::string joined;
        for (const tandem::Variant& variant : tandem::usable_variants())
            joined += (joined.empty() ? "" : ",") + std::string(variant.name);
        return joined;
    }();
    return names.c_str();
}

TandemModel* tandem_model_create(const TandemModelSpec* spec, const float* inverse_frequencies, const char* isa) {
    TandemModel* model = nullptr;
    guarded([&] { model = new TandemModel{tandem::Decoder(*spec, inverse_frequencies, kernels_for(isa))}; });
    return model;
}

void tandem_model_destroy(TandemModel* model) { delete model; }

int32_t tandem_model_takes(const TandemModel* model, int32_t format) {
    return format >= 0 && format < tandem::kNumFormats && model->decoder.takes((tandem::NumberFormat)format);
}

int32_t tandem_model_load(TandemModel* model, int32_t tensor, int32_t layer, int32_t rows, int32_t columns,
                          int32_t source, int32_t format, const void* data) {
    return guarded([&] {
        model->decoder.load((TandemTensor)tensor, layer, rows, columns, (tandem::NumberFormat)source,
                            (tandem::NumberFormat)format, data);
    });
}

int32_t tandem_model_attach_pool(TandemModel* model, const TandemKvPool* pool) {
    return guarded([&] { model->decoder.attach_pool(*pool); });
}

const char* tandem_model_isa(const TandemModel* model) { return model->decoder.isa(); }

void tandem_model_status(const TandemModel* model, TandemModelStatus* status) { model->decoder.status(status); }

int32_t tandem_model_memory(const TandemModel* model, int32_t index, uint64_t* address, uint64_t* num_bytes) {
    const auto& ranges = model->decoder.arena().ranges();
    if (index < 0 || (size_t)index >= ranges.size()) return 0;
    *address = (uint64_t)ranges[(size_t)index].address;
    *num_bytes = ranges[(size_t)index].num_bytes;
    return 1;
}

int32_t tandem_model_forward(TandemModel* model, const TandemStep* step, float* logits, int64_t logits_stride,
                             float* hidden, TandemLayerCallback layer_done) {
    return guarded([&] { model->decoder.forward(*step, logits, (size_t)logits_stride, hidden, layer_done); });
}

TandemDrafter* tandem_drafter_create(TandemModel* layer, const TandemDraftSpec* spec) {
    TandemDrafter* drafter = nullptr;
    guarded([&] {
        drafter = new TandemDrafter{tandem::DraftChain(layer->decoder, *spec, kernels_for(layer->decoder.isa()))};
    });
    return drafter;
}

void tandem_drafter_destroy(TandemDrafter* drafter) { delete drafter; }

int32_t tandem_drafter_propose(TandemDrafter* drafter, const TandemDraftBatch* batch, const TandemDraftLaws* laws) {
    return guarded([&] { drafter->chain.propose(*batch, *laws); });
}

TandemMatrix* tandem_matrix_create(const char* isa, int32_t rows, int32_t columns, int32_t source, int32_t format,
                                   const void* data) {
    std::unique_ptr<TandemMatrix> matrix;
    const int32_t failed = guarded([&] {
        matrix.reset(new TandemMatrix{kernels_for(isa), {}, {}});
        if (format < 0 || format >= tandem::kNumFormats) throw std::invalid_argument("no such format");
        if (!matrix->kernels.linear[format].multiply)
            throw std::invalid_argument("instruction set " + std::string(matrix->kernels.name) +
                                        " has no kernel for this format");
        const auto kept = (tandem::NumberFormat)format;
        matrix->packed = tandem::allocate_matrix(matrix->arena, kept, rows, columns, matrix->kernels.in_half(kept));
        tandem::pack_matrix(matrix->arena, matrix->packed, 0, 1, rows, (tandem::NumberFormat)source, data);
    });
    return failed ? nullptr : matrix.release();
}

int64_t tandem_matrix_bytes(const TandemMatrix* matrix) { return (int64_t)matrix->arena.used_bytes(); }

int32_t tandem_matrix_multiply(const TandemMatrix* matrix, const float* x, int32_t num_rows, float* out,
                               int64_t out_stride) {
    return guarded([&] {
        const tandem::PackedMatrix& packed = matrix->packed;
        if (out_stride < tandem::padded(packed.n)) throw std::invalid_argument("out_stride is too small");
        const tandem::LinearKernels& linear = matrix->linear();
        std::vector<uint8_t> scratch(linear.packed_bytes(num_rows, packed.k_padded) + 64);
        void* activations = (void*)(((size_t)scratch.data() + 63) / 64 * 64);
        std::vector<uint8_t> expanded(linear.scratch_bytes(num_rows, packed.k_padded) + 64);
        linear.pack(x, (size_t)packed.k, 0, num_rows, num_rows, packed.k, packed.k_padded, activations);
        linear.multiply(activations, num_rows, packed, 0, packed.panels, out, (size_t)out_stride, false,
                        (void*)(((size_t)expanded.data() + 63) / 64 * 64));
    });
}

int32_t tandem_matrix_row(const TandemMatrix* matrix, int32_t row, float* out) {
    return guarded([&] {
        if (row < 0 || row >= matrix->packed.n) throw std::invalid_argument("a row is outside the matrix");
        matrix->kernels.embed(matrix->packed, row, out);
    });
}

void tandem_matrix_destroy(TandemMatrix* matrix) { delete matrix; }

TandemPages* tandem_pages_create(void* memory, int64_t num_bytes) {
    TandemPages* pages = nullptr;
    guarded([&] { pages = new TandemPages{{(uint8_t*)memory, (size_t)num_bytes}}; });
    return pages;
}

void tandem_pages_reach(TandemPages* pages, int64_t now_bytes, int64_t later_bytes) {
    pages->ahead.reach((size_t)now_bytes, (size_t)later_bytes);
}

void tandem_pages_make_way(TandemPages* pages, int32_t is_computing) { pages->ahead.make_way(is_computing != 0); }

int64_t tandem_pages_touched(const TandemPages* pages) { return (int64_t)pages->ahead.touched_bytes(); }

void tandem_pages_destroy(TandemPages* pages) { delete pages; }

int32_t tandem_gumbel_argmax(const char* isa, const float* scaled, int64_t stride, int32_t rows, int32_t vocab_size,
                             const int64_t* peak_ids, const uint64_t* seeds, const uint64_t* choice_indices,
                             const uint64_t* positions, int64_t* token_ids) {
    return guarded([&] {
        const tandem::KernelTable kernels = kernels_for(isa);
        for (int32_t row = 0; row < rows; ++row) {
            if (peak_ids[row] < 0 || peak_ids[row] >= vocab_size)
                throw std::invalid_argument("a peak is outside the vocabulary");
            const tandem::NoiseKey key = {seeds[row], (uint32_t)choice_indices[row], (uint32_t)positions[row]};
            token_ids[row] = kernels.gumbel_argmax(scaled + row * stride, vocab_size, peak_ids[row], key);
        }
    });
}

int32_t tandem_scale_and_filter(const char* isa, float* logits, int64_t stride, int32_t rows, int32_t vocab_size,
                                const float* peaks, const float* temperatures, const int32_t* top_k,
                                const double* top_p, const double* min_p) {
    return guarded([&] {
        const tandem::FilterKernels kernels = kernels_for(isa).filter;
        std::vector<float> scratch;
        for (int32_t row = 0; row < rows; ++row) {
            float* scaled = logits + row * stride;
            kernels.scale_row(scaled, vocab_size, peaks[row], temperatures[row]);
            const tandem::FilterParams params = {top_k[row], top_p[row], min_p[row]};
            const float threshold = tandem::keep_threshold(kernels, scaled, vocab_size, params, scratch);
            if (threshold > -std::numeric_limits<float>::infinity()) kernels.drop_below(scaled, vocab_size, threshold);
        }
    });
}

int64_t tandem_read_once(const char* isa, const void* data, int64_t num_bytes) {
    int64_t sum = -1;
    guarded([&] { sum = (uint32_t)kernels_for(isa).read_once((const uint8_t*)data, (size_t)num_bytes); });
    return sum;
}

double tandem_multiply_in_registers(const char* isa, int32_t format, int32_t iterations) {
    double operations = -1;
    guarded([&] {
        operations = kernels_for(isa).multiply_in_registers((tandem::NumberFormat)format, iterations);
    });
    return operations;
}

}  // extern "C"
