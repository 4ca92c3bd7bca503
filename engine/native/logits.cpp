// The step's last product, and each row's most likely token while its logits are in the cache.
#include <algorithm>
#include <cmath>

#include "decoder.h"

namespace tandem {

namespace {

// Their logits, of as many rows as decode at once, and their weights stay in the second cache.
constexpr int kSeenPanels = 64;

}  // namespace

void Decoder::compute_logits(const TandemStep& step, float* logits, size_t logits_stride, float* hidden) {
    const int rows = step.num_logit_rows;
    if (rows == 0) return;
    const size_t stride = (size_t)padded(spec_.hidden_size);
    for (int i = 0; i < rows; ++i)
        kernels_.rms_norm(work_.residual.data() + (size_t)work_.logit_places[(size_t)i] * stride, stride, 1, spec_.hidden_size,
                          final_norm_.data(), spec_.rms_norm_eps, hidden + (size_t)i * spec_.hidden_size, 0);
    const PackedMatrix& head = output_.data ? output_ : embedding_;
    const LinearKernels& kernel = kernels_.linear_of(head);
    uint8_t* packed = work_.packed.data();
    kernel.pack(hidden, (size_t)spec_.hidden_size, 0, rows, rows, head.k, head.k_padded, packed);
    work_.peaks.assign((size_t)threads_.size() * rows, Peak{});
    const bool keep = !step.only_most_likely;
    const size_t seen_stride = keep ? logits_stride : kSeenPanels * kPanelOutputs;
    if (!keep) work_.seen_logits.resize((size_t)threads_.size());
    threads_.split(head.panels, [&](int first, int last, int thread) {
        Peak* peaks = work_.peaks.data() + (size_t)thread * rows;
        if (!keep) work_.seen_logits[(size_t)thread].resize((size_t)rows * seen_stride);
        for (int panel = first, end; panel < last; panel = end) {
            end = std::min(last, panel + kSeenPanels);
            float* seen = keep ? logits + (size_t)panel * kPanelOutputs : work_.seen_logits[(size_t)thread].data();
            kernel.multiply(packed, rows, head, panel, end, seen, seen_stride, false, work_.expanded[(size_t)thread].data());
            const int token = panel * kPanelOutputs, num_seen = std::min(end * kPanelOutputs, spec_.vocab_size) - token;
            for (int row = 0; step.most_likely && row < rows; ++row)
                kernels_.look_at(seen + (size_t)row * seen_stride, token, num_seen, peaks + row);
        }
    });
    for (int row = 0; step.most_likely && row < rows; ++row) {
        Peak peak;
        for (int thread = 0; thread < threads_.size(); ++thread) {  // in order of the vocabulary
            const Peak& part = work_.peaks[(size_t)thread * rows + row];
            peak.has_nan |= part.has_nan;
            if (part.value > peak.value) peak.value = part.value, peak.token = part.token;
        }
        step.most_likely[row] = peak.has_nan || !std::isfinite(peak.value) ? -1 : peak.token;
    }
}

}  // namespace tandem
