// What the machine can do at best: a read of memory and products of registers, to set measured times against.
#pragma once
#include "kernel_table.h"
#include "kernels/tile.h"
#ifdef TANDEM_TILES
#include "kernels/amx_tiles.h"
#endif
#ifdef TANDEM_BF16_BY_HALF
#include "kernels/half_arithmetic.h"
#endif

namespace {

// Reads `num_bytes` (a multiple of 128) once, as two streams; the sum keeps the loads.
inline int32_t read_once(const uint8_t* data, size_t num_bytes) {
    const size_t half = num_bytes / 128 * 64;
    I first[kVectors], second[kVectors];
    for (int v = 0; v < kVectors; ++v) first[v] = second[v] = izero();
    for (size_t at = 0; at < half; at += 64)
        for (int v = 0; v < kVectors; ++v) {
            first[v] = iadd(first[v], iload(data + at + v * kWidth * 4));
            second[v] = iadd(second[v], iload(data + half + at + v * kWidth * 4));
        }
    int32_t lanes[kWidth], sum = 0;
    for (int v = 0; v < kVectors; ++v) {
        istore(lanes, iadd(first[v], second[v]));
        for (int i = 0; i < kWidth; ++i) sum += lanes[i];
    }
    return sum;
}

constexpr int kFloorChains = kRegisters / 2 - 2;  // more than latency times rate, few enough to stay in registers

inline uint8_t kept_byte(F x) { return (uint8_t)vsum(x); }
inline uint8_t kept_byte(I x) { return (uint8_t)vsum(vfrom_int(x)); }

// Zeros that the compiler cannot tell from those of another chain: equal chains would become one.
template <class Vector, size_t kChain>
inline Vector unknown_zero() {
    alignas(64) uint8_t zeros[kRowBytes] = {};
    asm volatile("" : "+m"(zeros));
    Vector loaded;
    __builtin_memcpy(&loaded, zeros, sizeof loaded);
    return loaded;
}

// acc[i] = step(acc[i], w) for each chain, `iterations` times. Chains are written out, so that they stay in registers;
// w is read anew each time, so that nothing of a product can be taken out of the loop.
template <class Vector, class Load, class Step, size_t... Is>
inline void run_chains(int iterations, const Load& load, const Step& step, std::index_sequence<Is...>) {
    Vector acc[] = {unknown_zero<Vector, Is>()...};
    alignas(64) uint8_t zeros[kRowBytes] = {};
    for (int n = 0; n < iterations; ++n) {
        asm volatile("" : "+m"(zeros));
        const auto w = load(zeros);
        ((acc[Is] = step(acc[Is], w)), ...);
    }
    ((zeros[0] |= (uint8_t)(kept_byte(acc[Is]))), ...);
    asm volatile("" ::"m"(zeros));
}

// Multiplies zeros in registers; returns the operations (a product and a sum are two).
template <class Dot>
inline double multiply_registers(int iterations) {
    run_chains<F>(
        iterations, [](const uint8_t* p) { return Dot::load(p); },
        [](F acc, typename Dot::Weights w) { return Dot::accumulate(acc, Dot::template part<0>(w), typename Dot::Activation(0)); },
        std::make_index_sequence<kFloorChains>());
    return 2.0 * Dot::kInputs * kWidth * kFloorChains * iterations;
}

inline double multiply_byte_registers(int iterations) {
    run_chains<I>(
        iterations, [](const uint8_t* p) { return iload(p); }, [](I acc, I w) { return dot_bytes(acc, w, w); },
        std::make_index_sequence<kFloorChains>());
    return 8.0 * kWidth * kFloorChains * iterations;
}

#ifdef TANDEM_BF16_BY_HALF
inline double multiply_half_registers(int iterations) {
    run_chains<I>(
        iterations, [](const uint8_t* p) { return iload(p); },
        [](I acc, I w) { return _mm512_castph_si512(hfma(hbits(w), hbits(w), hbits(acc))); },
        std::make_index_sequence<kFloorChains>());
    return 4.0 * kWidth * kFloorChains * iterations;
}
#endif

#ifdef TANDEM_TILES
// Numbers as weights and activations have them: out of the caches, zeros ran 1.3 times as fast.
inline double multiply_tile_registers(int iterations) {
    alignas(64) static uint16_t numbers[2][kTileBytes / 2];
    uint32_t state = 1;
    for (auto& tile : numbers)
        for (uint16_t& number : tile) {
            state = state * 1664525u + 1013904223u;
            number = (uint16_t)((state >> 16 & 0x81ff) | 0x3c00);  // either sign, from 2^-7 to 2^-3
        }
    const TileSession session;
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    tile_load<4>(numbers[0], kRowBytes), tile_load<5>(numbers[1], kRowBytes);
    tile_load<6>(numbers[1], kRowBytes), tile_load<7>(numbers[0], kRowBytes);
    for (int n = 0; n < iterations; ++n) {
        tile_dot<0, 4, 6>();
        tile_dot<1, 4, 7>();
        tile_dot<2, 5, 6>();
        tile_dot<3, 5, 7>();
    }
    return 4.0 * 2.0 * 16 * 16 * 32 * iterations;
}
#endif

inline double multiply_in_registers(tandem::NumberFormat format, int iterations) {
    if (format == tandem::NumberFormat::kF32) return multiply_registers<DotF32>(iterations);
    if (tandem::is_block_format(format)) return multiply_byte_registers(iterations);
#if defined(TANDEM_TILES)
    return multiply_tile_registers(iterations);
#elif defined(TANDEM_BF16_BY_HALF)
    return multiply_half_registers(iterations);
#elif defined(TANDEM_BF16_BY_FMA)
    return multiply_registers<DotF32>(iterations);
#else
    return multiply_registers<DotPairs>(iterations);
#endif
}

}  // namespace
