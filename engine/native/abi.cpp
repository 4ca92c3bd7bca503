// The C functions of tandem_native.h: exceptions become return codes and a message.
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

#include "cpu_features.h"
#include "decoder.h"
#include "tandem_native.h"

struct TandemModel {
    tandem::Decoder decoder;
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
