#include "filtering.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace tandem {

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// The k-th largest value, searched among the likely tokens alone where these are enough.
float top_k_threshold(const FilterKernels& kernels, const float* scaled, int vocab_size, int top_k,
                      std::vector<float>& scratch) {
    int count = 0;
    for (const float cut : {-6.0f, -12.0f, kNone}) {
        count = kernels.collect_at_least(scaled, vocab_size, cut, scratch.data());
        if (count >= top_k) break;
    }
    const auto kth = scratch.begin() + (count - top_k);
    std::nth_element(scratch.begin(), kth, scratch.begin() + count);
    return *kth;
}

// Values of a row lie in (-inf, 0]; bucket b holds those in (-(b + 1), -b] / kBucketsPerUnit, the last one the rest.
constexpr float kBucketsPerUnit = 32.0f;
constexpr int kNumBuckets = 1024;

int bucket_of(float value) {
    const float bucket = -value * kBucketsPerUnit;
    return bucket < (float)(kNumBuckets - 1) ? (int)bucket : kNumBuckets - 1;
}

// The value at which the most likely tokens first hold `top_p` of the mass of those of at least `least`. What is below
// the cut together weighs at most (1 - top_p) of it and cannot be needed. The rest is weighed by buckets, and only the
// bucket in which the border lies is sorted: a flat distribution has tens of thousands of likely tokens.
float top_p_threshold(const FilterKernels& kernels, const float* scaled, int vocab_size, double top_p, float least,
                      std::vector<float>& scratch) {
    int num_candidates = 0;
    const double total = kernels.mass_at_least(scaled, vocab_size, least, &num_candidates);
    const float cut = std::min((float)std::log((1.0 - top_p) * total / num_candidates), 0.0f);
    float* values = scratch.data();
    const int count = kernels.collect_at_least(scaled, vocab_size, std::max(cut, least), values);
    float* weights = values + vocab_size;
    kernels.exponentials(values, count, weights);
    double masses[kNumBuckets] = {};
    for (int i = 0; i < count; ++i) masses[bucket_of(values[i])] += (double)weights[i];
    const double wanted = top_p * total;
    double mass = 0.0;
    int border = 0;
    for (; border < kNumBuckets - 1 && mass + masses[border] < wanted; ++border) mass += masses[border];
    float* end = std::partition(values, values + count, [&](float value) { return bucket_of(value) == border; });
    std::sort(values, end, std::greater<float>());
    for (float* value = values; value != end; ++value) {
        mass += std::exp((double)*value);
        if (mass >= wanted) return *value;
    }
    // What is missing after the whole bucket is a last bit of the sums.
    return end != values ? *(end - 1) : std::max(cut, least);
}

}  // namespace

float keep_threshold(const FilterKernels& kernels, const float* scaled, int vocab_size, const FilterParams& params,
                     std::vector<float>& scratch) {
    if (scratch.size() < 2 * (size_t)vocab_size) scratch.resize(2 * (size_t)vocab_size);
    float threshold = kNone;
    if (params.top_k > 0 && params.top_k < vocab_size)
        threshold = top_k_threshold(kernels, scaled, vocab_size, params.top_k, scratch);
    if (params.top_p < 1.0)
        threshold = top_p_threshold(kernels, scaled, vocab_size, params.top_p, threshold, scratch);
    if (params.min_p > 0.0) threshold = std::max(threshold, (float)std::log(params.min_p));
    return std::min(threshold, 0.0f);
}

}  // namespace tandem
