// How weights lie in memory after packing: one layout for every instruction set.
//
// A matrix [n, k] is cut into panels of 16 outputs, each a run of bytes read once from front to back. Within a panel,
// one 64-byte row holds the same k (or group of k) for the 16 outputs, so a row is one vector of weights:
//   F32    row = 16 floats, one k
//   BF16   row = 16 pairs of bfloat16: k, k + 1
//   BF16_COMPRESSED  the same values in 12 bits each (compressed_panel.h)
//   Q4_x   blocks of 32 k: 4 rows of nibbles (byte i of an output's dword in row j: k = 8j + i low, 8j + 4 + i high),
//          16 float16 scales d, for Q4_1 16 float16 minima m:  weight = d * q + m  (Q4_0: d * (q - 8))
//   Q8_0   blocks of 32 k: 8 rows of 16 groups of four bytes (value + 128), 16 float16 scales d: weight = d * (q - 128)
// n is padded to 16 with zeros and k to 32, which also makes 16 rows of BF16 one AMX tile.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tandem {

constexpr int kPanelOutputs = 16;
constexpr int kBlockInputs = 32;
constexpr size_t kRowBytes = 64;
constexpr size_t kHalfRowBytes = 32;

// Number formats of checkpoints; all but kF16 are also formats of packed matrices. The block types are GGUF's.
enum class NumberFormat : int32_t { kF32 = 0, kBf16 = 1, kF16 = 2, kQ4_0 = 3, kQ4_1 = 4, kQ8_0 = 5, kBf16Compressed = 6 };
constexpr int kNumFormats = 7;

inline bool is_block_format(NumberFormat format) {
    return (int)format >= (int)NumberFormat::kQ4_0 && (int)format <= (int)NumberFormat::kQ8_0;
}

struct HalfPanel;

struct PackedMatrix {
    NumberFormat format = NumberFormat::kF32;
    int n = 0;         // outputs
    int k = 0;         // inputs
    int k_padded = 0;  // inputs rounded up to 32
    int panels = 0;
    size_t panel_bytes = 0;
    uint8_t* data = nullptr;
    int64_t exceptions = 0;    // of BF16_COMPRESSED: weights that are kept beside their panel
    int64_t plain_panels = 0;  // of BF16_COMPRESSED: panels that are kept as BF16

    HalfPanel* half = nullptr;   // of each panel, where products are in half precision; else null
    int unfit_panels = 0;        // of these: such as would lose too much, so that all products are in float32

    bool takes_half() const { return half && unfit_panels == 0; }
    const uint8_t* panel(int index) const { return data + (size_t)index * panel_bytes; }
    uint8_t* panel(int index) { return data + (size_t)index * panel_bytes; }
};

inline size_t block_bytes(NumberFormat format) {
    switch (format) {
        case NumberFormat::kQ4_0: return 4 * kRowBytes + kHalfRowBytes;
        case NumberFormat::kQ4_1: return 4 * kRowBytes + 2 * kHalfRowBytes;
        case NumberFormat::kQ8_0: return 8 * kRowBytes + kHalfRowBytes;
        case NumberFormat::kBf16: return 16 * kRowBytes;
        case NumberFormat::kBf16Compressed: return 12 * kRowBytes;
        case NumberFormat::kF32: return 32 * kRowBytes;
        case NumberFormat::kF16: break;  // only in checkpoints
    }
    return 0;
}

inline int padded(int outputs) { return (outputs + kPanelOutputs - 1) / kPanelOutputs * kPanelOutputs; }

inline size_t panel_bytes(NumberFormat format, int k_padded) {
    const size_t header = format == NumberFormat::kBf16Compressed ? kRowBytes : 0;
    return header + (size_t)(k_padded / kBlockInputs) * block_bytes(format);
}

}  // namespace tandem
