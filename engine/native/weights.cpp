// Loading: which tensor goes where in the decoder. q, k, v and gate, up become one matrix each.
#include <stdexcept>
#include <string>

#include "decoder.h"

namespace tandem {

namespace {
std::invalid_argument refused(TandemTensor tensor, int layer, const std::string& why) {
    return std::invalid_argument("tensor " + std::to_string(tensor) + " of layer " + std::to_string(layer) + ": " + why);
}

void need(bool present, const std::string& what) {
    if (!present) throw std::invalid_argument("weights are missing: " + what);
}
}  // namespace

Decoder::Part Decoder::matrix_part(TandemTensor tensor, int layer) {
    const int hidden = spec_.hidden_size, inner = spec_.intermediate_size;
    const int query = heads_width(), kv = kv_width();
    if (tensor == TANDEM_EMBEDDING) return {&embedding_, spec_.vocab_size, 0, hidden};
    if (tensor == TANDEM_OUTPUT) return {&output_, spec_.vocab_size, 0, hidden};
    Layer& of = layers_[(size_t)layer];
    switch (tensor) {
        case TANDEM_QUERY: return {&of.qkv, query + 2 * kv, 0, hidden};
        case TANDEM_KEY: return {&of.qkv, query + 2 * kv, query, hidden};
        case TANDEM_VALUE: return {&of.qkv, query + 2 * kv, query + kv, hidden};
        case TANDEM_ATTENTION_OUTPUT: return {&of.output, hidden, 0, query};
        case TANDEM_GATE: return {&of.gate_up, 2 * padded(inner), 0, hidden, 2};
        case TANDEM_UP: return {&of.gate_up, 2 * padded(inner), kPanelOutputs, hidden, 2};
        case TANDEM_DOWN: return {&of.down, hidden, 0, inner};
        default: return {nullptr, 0, 0, 0};
    }
}

std::vector<float>* Decoder::vector_part(TandemTensor tensor, int layer, size_t* offset, size_t* size) {
    const size_t hidden = (size_t)spec_.hidden_size, query = (size_t)heads_width(), kv = (size_t)kv_width();
    *offset = 0;
    *size = hidden;
    if (tensor == TANDEM_FINAL_NORM) return &final_norm_;
    Layer& of = layers_[(size_t)layer];
    switch (tensor) {
        case TANDEM_ATTENTION_NORM: return &of.attention_norm;
        case TANDEM_MLP_NORM: return &of.mlp_norm;
        case TANDEM_QUERY_NORM: *size = (size_t)spec_.head_dim; return &of.query_norm;
        case TANDEM_KEY_NORM: *size = (size_t)spec_.head_dim; return &of.key_norm;
        case TANDEM_QUERY_BIAS: *size = query + 2 * kv; return &of.qkv_bias;
        case TANDEM_KEY_BIAS: *size = query + 2 * kv; *offset = query; return &of.qkv_bias;
        case TANDEM_VALUE_BIAS: *size = query + 2 * kv; *offset = query + kv; return &of.qkv_bias;
        default: return nullptr;
    }
}

void Decoder::load(TandemTensor tensor, int layer, int rows, int columns, NumberFormat source, NumberFormat format,
                   const void* data) {
    if (layer < 0 || layer >= spec_.num_layers) throw refused(tensor, layer, "no such layer");
    const Part part = matrix_part(tensor, layer);
    if (part.matrix) {
        if (columns != part.columns || part.first_row + rows > part.matrix_rows)
            throw refused(tensor, layer, "shape " + std::to_string(rows) + " x " + std::to_string(columns));
        if (!takes(format))
            throw refused(tensor, layer, "instruction set " + std::string(isa()) + " has no kernel for this format");
        if (!part.matrix->data)
            *part.matrix = allocate_matrix(arena_, format, part.matrix_rows, part.columns, kernels_.in_half(format));
        if (part.matrix->format != format) throw refused(tensor, layer, "parts of one matrix in different formats");
        pack_matrix(arena_, *part.matrix, part.first_row, part.panel_step, rows, source, data);
        return;
    }
    size_t offset, size;
    std::vector<float>* values = vector_part(tensor, layer, &offset, &size);
    if (!values || rows != 1 || offset + (size_t)columns > size) throw refused(tensor, layer, "shape or kind");
    values->resize(size, 0.0f);
    for (int i = 0; i < columns; ++i) (*values)[offset + (size_t)i] = float_of(source, data, (size_t)i);
}

void Decoder::check_loaded() const {
    need(embedding_.data, "embedding");
    need(!final_norm_.empty(), "final norm");
    for (size_t i = 0; i < layers_.size(); ++i) {
        const Layer& layer = layers_[i];
        need(layer.qkv.data && layer.output.data && layer.gate_up.data && layer.down.data &&
                 !layer.attention_norm.empty() && !layer.mlp_norm.empty() &&
                 layer.query_norm.empty() == layer.key_norm.empty(),
             "layer " + std::to_string(i));
    }
}

}  // namespace tandem
