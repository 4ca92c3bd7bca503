#include "packing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "compression.h"
#include "half_panel.h"

namespace tandem {

namespace {

float f16_to_float(uint16_t half) {
    const int exponent = (half >> 10) & 31, mantissa = half & 1023;
    float value;
    if (exponent == 0) {
        value = std::ldexp((float)mantissa, -24);
    } else if (exponent == 31) {
        value = mantissa ? NAN : INFINITY;
    } else {
        // 112: between the offsets of the two exponents.
        const uint32_t bits = ((uint32_t)(half & 0x7fff) + (112u << 10)) << 13;
        std::memcpy(&value, &bits, 4);
    }
    return half & 0x8000 ? -value : value;
}

// Round to nearest even, the same as the hardware's conversion; values too large become infinity.
uint16_t float_to_f16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = (bits >> 16) & 0x8000;
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return sign | 0x7e00;
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    int exponent = magnitude > 0.0f ? std::ilogb(magnitude) : -15;
    if (exponent < -14) return sign | (uint16_t)std::nearbyint(std::ldexp(magnitude, 24));
    // A mantissa that rounds up to 2048 carries into the exponent by itself.
    const int mantissa = (int)std::nearbyint(std::ldexp(magnitude, 10 - exponent));
    return sign | (uint16_t)(((exponent + 15) << 10) + mantissa - 1024);
}

// Round to nearest even. In integers, so that the compiler makes it for many at once.
uint16_t float_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return is_nan ? (uint16_t)0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void pack_row_f32(uint8_t* panel, int lane, const float* row, int k) {
    for (int i = 0; i < k; ++i) std::memcpy(panel + i * kRowBytes + 4 * lane, row + i, 4);
}

// GGUF's block: [d float16][m float16 for Q4_1][16 bytes: inputs 0..15 in the low nibbles, 16..31 in the high ones].
void pack_block_q4(uint8_t* block, int lane, const uint8_t* source, bool has_minimum) {
    const uint8_t* nibbles = source + (has_minimum ? 4 : 2);
    for (int i = 0; i < kBlockInputs; ++i) {
        const int value = i < 16 ? nibbles[i] & 15 : nibbles[i - 16] >> 4;
        block[i / 8 * kRowBytes + 4 * lane + i % 4] |= (uint8_t)(value << (i % 8 >= 4 ? 4 : 0));
    }
    std::memcpy(block + 4 * kRowBytes + 2 * lane, source, 2);
    if (has_minimum) std::memcpy(block + 4 * kRowBytes + kHalfRowBytes + 2 * lane, source + 2, 2);
}

// GGUF's block: [d float16][32 int8].
void pack_block_q8(uint8_t* block, int lane, const uint8_t* source) {
    for (int i = 0; i < kBlockInputs; ++i)
        block[i / 4 * kRowBytes + 4 * lane + i % 4] = (uint8_t)((int8_t)source[2 + i] + 128);
    std::memcpy(block + 8 * kRowBytes + 2 * lane, source, 2);
}

// A Q4_1 block of 32 floats: m is the minimum, d a fifteenth of the range.
void quantize_block_q4_1(const float* values, uint8_t* block) {
    float low = values[0], high = values[0];
    for (int i = 1; i < kBlockInputs; ++i) low = std::fmin(low, values[i]), high = std::fmax(high, values[i]);
    const uint16_t d = float_to_f16((high - low) / 15.0f), m = float_to_f16(low);
    const float step = f16_to_float(d), base = f16_to_float(m);
    std::memcpy(block, &d, 2);
    std::memcpy(block + 2, &m, 2);
    std::memset(block + 4, 0, 16);
    for (int i = 0; i < kBlockInputs; ++i) {
        const float scaled = step > 0.0f ? std::nearbyint((values[i] - base) / step) : 0.0f;
        const int value = (int)std::fmin(std::fmax(scaled, 0.0f), 15.0f);
        block[4 + i % 16] |= (uint8_t)(value << (i < 16 ? 0 : 4));
    }
}

// A Q8_0 block of 32 floats: d is the largest magnitude over 127.
void quantize_block_q8_0(const float* values, uint8_t* block) {
    float highest = 0.0f;
    for (int i = 0; i < kBlockInputs; ++i) highest = std::fmax(highest, std::fabs(values[i]));
    const uint16_t d = float_to_f16(highest / 127.0f);
    const float step = f16_to_float(d);
    std::memcpy(block, &d, 2);
    for (int i = 0; i < kBlockInputs; ++i) {
        const float scaled = step > 0.0f ? std::nearbyint(values[i] / step) : 0.0f;
        block[2 + i] = (uint8_t)(int8_t)std::fmin(std::fmax(scaled, -127.0f), 127.0f);
    }
}

size_t source_block_bytes(NumberFormat source) {
    return source == NumberFormat::kQ4_0 ? 18 : (source == NumberFormat::kQ4_1 ? 20 : 34);
}

// GGUF's blocks as floats, with the roundings of a product and a sum in float32.
void dequantize_row(NumberFormat source, const uint8_t* row, int k, float* out) {
    for (int first = 0; first < k; first += kBlockInputs, row += source_block_bytes(source), out += kBlockInputs) {
        uint16_t halves[2];
        std::memcpy(halves, row, sizeof halves);
        const float d = f16_to_float(halves[0]);
        if (source == NumberFormat::kQ8_0) {
            for (int i = 0; i < kBlockInputs; ++i) out[i] = d * (float)(int8_t)row[2 + i];
            continue;
        }
        const bool has_minimum = source == NumberFormat::kQ4_1;
        const uint8_t* nibbles = row + (has_minimum ? 4 : 2);
        const float minimum = has_minimum ? f16_to_float(halves[1]) : 0.0f;
        const int offset = has_minimum ? 0 : 8;
        for (int i = 0; i < 16; ++i) {
            const float low = d * (float)((nibbles[i] & 15) - offset), high = d * (float)((nibbles[i] >> 4) - offset);
            out[i] = has_minimum ? low + minimum : low;
            out[16 + i] = has_minimum ? high + minimum : high;
        }
    }
}

void pack_blocks(PackedMatrix& matrix, int output, const uint8_t* row, NumberFormat source) {
    uint8_t* panel = matrix.panel(output / kPanelOutputs);
    const int lane = output % kPanelOutputs;
    for (int b = 0; b < matrix.k / kBlockInputs; ++b, row += source_block_bytes(source)) {
        uint8_t* block = panel + (size_t)b * block_bytes(matrix.format);
        if (matrix.format == NumberFormat::kQ8_0)
            pack_block_q8(block, lane, row);
        else
            pack_block_q4(block, lane, row, matrix.format == NumberFormat::kQ4_1);
    }
}

void pack_floats(PackedMatrix& matrix, int output, const float* row) {
    uint8_t* panel = matrix.panel(output / kPanelOutputs);
    const int lane = output % kPanelOutputs;
    if (matrix.format == NumberFormat::kF32) return pack_row_f32(panel, lane, row, matrix.k);
    std::vector<uint8_t> blocks((size_t)matrix.k / kBlockInputs * source_block_bytes(matrix.format));
    uint8_t* block = blocks.data();
    for (int i = 0; i < matrix.k; i += kBlockInputs, block += source_block_bytes(matrix.format)) {
        if (matrix.format == NumberFormat::kQ8_0)
            quantize_block_q8_0(row + i, block);
        else
            quantize_block_q4_1(row + i, block);
    }
    pack_blocks(matrix, output, blocks.data(), matrix.format);
}

// The output that row i becomes: rows fill a panel, then go on `panel_step` panels further.
int output_of(int first_row, int panel_step, int i) {
    const int row = first_row % kPanelOutputs + i;
    const int panel = first_row / kPanelOutputs + row / kPanelOutputs * panel_step;
    return panel * kPanelOutputs + row % kPanelOutputs;
}

// The first row after i that goes into another panel.
int next_panel(int first_row, int i) { return i + kPanelOutputs - (first_row + i) % kPanelOutputs; }

void check(const PackedMatrix& matrix, int first_row, int last_output, NumberFormat source) {
    if (last_output >= matrix.n) throw std::invalid_argument("rows outside the matrix");
    if (matrix.format == NumberFormat::kBf16Compressed && first_row % kPanelOutputs != 0)
        throw std::invalid_argument("a compressed panel is filled at once: rows start at a multiple of 16, not " +
                                    std::to_string(first_row));
    if ((is_block_format(matrix.format) || is_block_format(source)) && matrix.k % kBlockInputs != 0)
        throw std::invalid_argument("a block format needs inputs in multiples of 32, not " + std::to_string(matrix.k));
    const bool keeps_floats = !is_block_format(matrix.format);
    const bool takes = is_block_format(source) ? keeps_floats || source == matrix.format : matrix.format != NumberFormat::kQ4_0;
    if (!takes) throw std::invalid_argument("this source cannot be kept in this format");
}

const uint8_t* block_row(const PackedMatrix& matrix, NumberFormat source, const void* data, int row) {
    return (const uint8_t*)data + (size_t)row * (size_t)(matrix.k / kBlockInputs) * source_block_bytes(source);
}

void floats_of_row(const PackedMatrix& matrix, NumberFormat source, const void* data, int row, float* out) {
    if (is_block_format(source)) return dequantize_row(source, block_row(matrix, source, data, row), matrix.k, out);
    for (int i = 0; i < matrix.k; ++i) out[i] = float_of(source, data, (size_t)row * (size_t)matrix.k + (size_t)i);
}

// Up to 16 rows side by side as bfloat16, which then become the columns of a panel: written one by one, each would go
// through all of the panel.
class Bf16Rows {
  public:
    explicit Bf16Rows(const PackedMatrix& matrix)
        : matrix_(matrix),
          stride_((size_t)matrix.k_padded + kRowBytes / 2),  // no power of two, whose rows would share a cache's sets
          rows_(stride_ * kPanelOutputs),
          floats_((size_t)matrix.k) {}

    // Rows [first, first + count) of `data` into lanes of the panel from `lane` on.
    void pack(NumberFormat source, const void* data, int first, int count, uint8_t* panel, int lane) {
        for (int i = 0; i < count; ++i) read(source, data, first + i, rows_.data() + (size_t)i * stride_);
        const size_t pairs = (size_t)(matrix_.k + 1) / 2;
        for (size_t pair = 0; pair < pairs; ++pair)
            for (int i = 0; i < count; ++i)
                std::memcpy(panel + pair * kRowBytes + 4 * (lane + i), rows_.data() + (size_t)i * stride_ + 2 * pair, 4);
    }

  private:
    void read(NumberFormat source, const void* data, int row, uint16_t* out) {
        const size_t k = (size_t)matrix_.k;
        if (source == NumberFormat::kBf16) {
            std::memcpy(out, (const uint16_t*)data + (size_t)row * k, 2 * k);
            return;
        }
        floats_of_row(matrix_, source, data, row, floats_.data());
        for (size_t i = 0; i < k; ++i) out[i] = float_to_bf16(floats_[i]);
    }

    const PackedMatrix& matrix_;
    const size_t stride_;
    std::vector<uint16_t> rows_;  // zeros behind each row's end
    std::vector<float> floats_;
};

void pack_bf16(PackedMatrix& matrix, int first_row, int panel_step, int rows, NumberFormat source, const void* data) {
    Bf16Rows lanes(matrix);
    for (int i = 0; i < rows; i = next_panel(first_row, i)) {
        const int output = output_of(first_row, panel_step, i), count = std::min(next_panel(first_row, i), rows) - i;
        lanes.pack(source, data, i, count, matrix.panel(output / kPanelOutputs), output % kPanelOutputs);
    }
}

void pack_rows(PackedMatrix& matrix, int first_row, int panel_step, int rows, NumberFormat source, const void* data) {
    std::vector<float> floats(source == matrix.format && is_block_format(source) ? 0 : (size_t)matrix.k);
    for (int i = 0; i < rows; ++i) {
        const int output = output_of(first_row, panel_step, i);
        if (floats.empty()) {
            pack_blocks(matrix, output, block_row(matrix, source, data, i), source);
            continue;
        }
        floats_of_row(matrix, source, data, i, floats.data());
        pack_floats(matrix, output, floats.data());
    }
}

// Whole panels: each is laid out as BF16, then compressed.
void pack_compressed(Arena& arena, PackedMatrix& matrix, int first_row, int panel_step, int rows, NumberFormat source,
                     const void* data) {
    PanelCompressor compressor(arena, matrix);
    Bf16Rows lanes(matrix);
    std::vector<uint8_t> plain(panel_bytes(NumberFormat::kBf16, matrix.k_padded));
    for (int first = 0; first < rows; first += kPanelOutputs) {
        const int count = std::min(kPanelOutputs, rows - first);
        if (count < kPanelOutputs) std::fill(plain.begin(), plain.end(), (uint8_t)0);
        lanes.pack(source, data, first, count, plain.data(), 0);
        compressor.compress(output_of(first_row, panel_step, first) / kPanelOutputs, plain.data());
    }
    compressor.finish();
}

}  // namespace

float float_of(NumberFormat source, const void* data, size_t index) {
    if (source == NumberFormat::kF32) return ((const float*)data)[index];
    const uint16_t bits = ((const uint16_t*)data)[index];
    if (source == NumberFormat::kF16) return f16_to_float(bits);
    const uint32_t widened = (uint32_t)bits << 16;
    float value;
    std::memcpy(&value, &widened, 4);
    return value;
}

PackedMatrix allocate_matrix(Arena& arena, NumberFormat format, int n, int k, bool in_half) {
    PackedMatrix matrix;
    matrix.format = format;
    matrix.n = n;
    matrix.k = k;
    matrix.k_padded = (k + kBlockInputs - 1) / kBlockInputs * kBlockInputs;
    matrix.panels = (n + kPanelOutputs - 1) / kPanelOutputs;
    matrix.panel_bytes = panel_bytes(format, matrix.k_padded);
    matrix.data = arena.take(matrix.panel_bytes * (size_t)matrix.panels);
    if (in_half) {
        matrix.half = (HalfPanel*)arena.take(sizeof(HalfPanel) * (size_t)matrix.panels);
        std::uninitialized_fill_n(matrix.half, matrix.panels, HalfPanel{});
    }
    return matrix;
}

void pack_matrix(Arena& arena, PackedMatrix& matrix, int first_row, int panel_step, int rows, NumberFormat source,
                 const void* data) {
    check(matrix, first_row, rows > 0 ? output_of(first_row, panel_step, rows - 1) : 0, source);
    if (matrix.format == NumberFormat::kBf16Compressed)
        return pack_compressed(arena, matrix, first_row, panel_step, rows, source, data);
    if (matrix.format == NumberFormat::kBf16)
        pack_bf16(matrix, first_row, panel_step, rows, source, data);
    else
        pack_rows(matrix, first_row, panel_step, rows, source, data);
    if (!matrix.half || rows == 0) return;
    for (int i = 0; i < rows; i = next_panel(first_row, i)) {
        const int panel = output_of(first_row, panel_step, i) / kPanelOutputs;
        set_half_panel(matrix, panel, half_panel(matrix.panel(panel), matrix.k_padded));
    }
}

}  // namespace tandem
