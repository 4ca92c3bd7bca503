// A row's most likely token, a part of the vocabulary at a time, while its logits are in the cache.
#pragma once
#include "kernel_table.h"
#include "kernels/vec.h"

namespace {

inline bool holds_nan(const float* logits, int count) {
    for (int i = 0; i < count; ++i)
        if (logits[i] != logits[i]) return true;
    return false;
}

// Looks at the logits of `count` tokens from `token` on.
inline void look_at(const float* logits, int token, int count, tandem::Peak* peak) {
    F highest = vset1(-__builtin_inff()), infinities = vzero();  // 0 times what is not finite is no number
    int i = 0;
    for (; i + kWidth <= count; i += kWidth) {
        const F values = vload(logits + i);
        highest = vmax(values, highest);  // passes by what is no number
        infinities = vfma(values, vzero(), infinities);
    }
    float largest = vmaximum(highest), rest = vsum(infinities);
    for (; i < count; ++i) {
        largest = logits[i] > largest ? logits[i] : largest;
        rest += logits[i] * 0.0f;
    }
    if (rest != rest) peak->has_nan |= holds_nan(logits, count);
    if (largest <= peak->value) return;
    peak->value = largest;
    int place = 0;
    while (logits[place] != largest) ++place;
    peak->token = token + place;
}

}  // namespace
