// The step's last product, and each row's most likely token while its logits are in the cache.
#include <algorithm>
#include <cmath>
#include <limits>

#include "decoder.h"

namespace tandem {

namespace {

// Their logits, of as many rows as decode at once, and their weights stay in the second cache.
constexpr int kPanelsAtOnce = 64;
constexpr int kLanes = 16;

// Looks at row[first, last). Of equal logits the first one counts.
void look_at(const float* row, int first, int last, Peak* peak) {
    float lanes[kLanes];
    int32_t unordered[kLanes] = {};
    std::fill(lanes, lanes + kLanes, -std::numeric_limits<float>::infinity());
    const auto look = [&](int lane, float value) {
        lanes[lane] = value > lanes[lane] ? value : lanes[lane];
        unordered[lane] |= value != value;
    };
    int i = first;
    for (; i + kLanes <= last; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane) look(lane, row[i + lane]);
    for (; i < last; ++i) look(0, row[i]);
    peak->has_nan |= std::any_of(unordered, unordered + kLanes, [](int32_t flag) { return flag != 0; });
    const float largest = *std::max_element(lanes, lanes + kLanes);
    if (largest <= peak->value) return;
    peak->value = largest;
    peak->token = (int32_t)(std::find(row + first, row + last, largest) - row);
}

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
    threads_.split(head.panels, [&](int first, int last, int thread) {
        Peak* peaks = work_.peaks.data() + (size_t)thread * rows;
        for (int panel = first, end; panel < last; panel = end) {
            end = std::min(last, panel + kPanelsAtOnce);
            kernel.multiply(packed, rows, head, panel, end, logits + (size_t)panel * kPanelOutputs, logits_stride, false,
                            work_.expanded[(size_t)thread].data());
            const int num_seen = std::min(end * kPanelOutputs, spec_.vocab_size);
            for (int row = 0; step.most_likely && row < rows; ++row)
                look_at(logits + (size_t)row * logits_stride, panel * kPanelOutputs, num_seen, peaks + row);
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
