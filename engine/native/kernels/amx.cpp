#define TANDEM_TILES
#include "kernels/table.h"

namespace tandem {

KernelTable amx_kernels() { return make_table("amx"); }

// One small product with known sums. Where the tiles do not work, this may also end with a signal.
bool amx_self_test() {
    constexpr int kRows = 20, kInputs = 64;
    alignas(64) static float x[kRows][kInputs], out[kRows][kPanelOutputs];
    alignas(64) static uint16_t weights[kInputs / 2][kPanelOutputs][2];
    alignas(64) static uint8_t packed[kRows * kInputs * 2];
    for (int row = 0; row < kRows; ++row)
        for (int i = 0; i < kInputs; ++i) x[row][i] = (float)((row + 3 * i) % 7 - 3);
    for (int i = 0; i < kInputs; ++i)
        for (int n = 0; n < kPanelOutputs; ++n) weights[i / 2][n][i % 2] = (i + n) % 3 ? 0x3f80 : 0xc000;  // 1 or -2
    PackedMatrix w;
    w.format = NumberFormat::kBf16;
    w.n = kPanelOutputs;
    w.k = w.k_padded = kInputs;
    w.panels = 1;
    w.panel_bytes = sizeof weights;
    w.data = (uint8_t*)weights;
    TileActivations::pack(x[0], kInputs, 0, kRows, kRows, kInputs, kInputs, packed);
    TileLinear<PlainWeights>::multiply(packed, kRows, w, 0, 1, out[0], kPanelOutputs, false, nullptr);
    for (int row = 0; row < kRows; ++row)
        for (int n = 0; n < kPanelOutputs; ++n) {
            float expected = 0.0f;  // small whole numbers: exact in any order
            for (int i = 0; i < kInputs; ++i) expected += x[row][i] * ((i + n) % 3 ? 1.0f : -2.0f);
            if (out[row][n] != expected) return false;
        }
    return true;
}

}  // namespace tandem
