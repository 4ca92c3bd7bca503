// AMX: eight tiles of up to 16 rows of 64 bytes, by their part in a product of two tiles of rows and two of weights:
//
//     weights          6       7
//     rows 4  sums     0       1
//     rows 5           2       3
//
// Few rows take them in their own ways: linear layers of up to 16 (tile_linear.h) and attention (few_rows_tiles.h).
//
// The instructions are written as assembly with memory clobbers: with GCC 12's intrinsics the stores to the
// configuration or to the operands can be dropped before a tile is loaded. With TANDEM_EMULATE_TILES plain code stands in,
// so that what is built on top is tested on processors without AMX.
#pragma once
#include <cstddef>
#include <cstdint>

namespace {

constexpr int kTileRows = 16;
constexpr size_t kTileBytes = 1024;

struct alignas(64) TileConfiguration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};

    // The first `num_short` tiles have so many rows, the others 16.
    TileConfiguration(int num_short, int short_rows) {
        for (int tile = 0; tile < 8; ++tile) rows[tile] = (uint8_t)(tile < num_short ? short_rows : kTileRows);
    }
    // Columns of 4 bytes each.
    void set_columns(int tile, int columns) { row_bytes[tile] = (uint16_t)(4 * columns); }
    // Of two tiles of rows.
    static TileConfiguration of_grid(int first_rows, int second_rows) {
        TileConfiguration grid(0, 0);
        grid.rows[0] = grid.rows[1] = grid.rows[4] = (uint8_t)first_rows;
        grid.rows[2] = grid.rows[3] = grid.rows[5] = (uint8_t)second_rows;
        return grid;
    }
};

#if defined(TANDEM_EMULATE_TILES)

struct EmulatedTile {
    alignas(64) uint8_t bytes[kTileRows][64];
};
thread_local EmulatedTile emulated_tiles[8];

thread_local int emulated_rows[8], emulated_row_bytes[8];

inline void tiles_configure(const TileConfiguration& configuration) {
    for (int tile = 0; tile < 8; ++tile) {
        emulated_rows[tile] = configuration.rows[tile], emulated_row_bytes[tile] = configuration.row_bytes[tile];
        emulated_tiles[tile] = {};
    }
}
inline void tiles_release() {}
template <int T>
inline void tile_zero() {
    emulated_tiles[T] = {};
}
template <int T>
inline void tile_load(const void* from, size_t row_stride) {
    for (int row = 0; row < emulated_rows[T]; ++row)
        __builtin_memcpy(emulated_tiles[T].bytes[row], (const uint8_t*)from + row * row_stride, (size_t)emulated_row_bytes[T]);
}
template <int T>
inline void tile_store(void* to, size_t row_stride) {
    for (int row = 0; row < emulated_rows[T]; ++row)
        __builtin_memcpy((uint8_t*)to + row * row_stride, emulated_tiles[T].bytes[row], (size_t)emulated_row_bytes[T]);
}
template <int T>
inline void tile_load_passing(const void* from, size_t row_stride) {
    tile_load<T>(from, row_stride);
}
inline float emulated_bf16(const uint8_t* from) {
    const uint32_t bits = (uint32_t)from[0] << 16 | (uint32_t)from[1] << 24;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
// C += A B as the instruction defines it: the even and the odd products of a row are summed apart, then together.
template <int C, int A, int B>
inline void tile_dot() {
    for (int row = 0; row < emulated_rows[C]; ++row)
        for (int column = 0; column < emulated_row_bytes[C] / 4; ++column) {
            float even = 0.0f, odd = 0.0f, sum;
            for (int k = 0; k < 16; ++k) {
                const uint8_t *a = emulated_tiles[A].bytes[row] + 4 * k, *b = emulated_tiles[B].bytes[k] + 4 * column;
                even += emulated_bf16(a) * emulated_bf16(b);
                odd += emulated_bf16(a + 2) * emulated_bf16(b + 2);
            }
            uint8_t* c = emulated_tiles[C].bytes[row] + 4 * column;
            __builtin_memcpy(&sum, c, 4);
            sum += even + odd;
            __builtin_memcpy(c, &sum, 4);
        }
}

#else

inline void tiles_configure(const TileConfiguration& configuration) {
    asm volatile("ldtilecfg %0" ::"m"(configuration) : "memory");
}
inline void tiles_release() { asm volatile("tilerelease" ::: "memory"); }
template <int T>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void tile_load(const void* from, size_t row_stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_stride), "i"(T) : "memory");
}
// The same for bytes that are not to take the place of others in the first cache.
template <int T>
inline void tile_load_passing(const void* from, size_t row_stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_stride), "i"(T) : "memory");
}
template <int T>
inline void tile_store(void* to, size_t row_stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_stride), "i"(T) : "memory");
}
template <int C, int A, int B>
inline void tile_dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

// A product that nobody needs, into a tile that holds nothing: what takes long between products calls it now and then. After
// about 1,900 cycles without one the unit that makes products sleeps, and whoever asks next waits for 1,000 cycles, in which
// the core does hardly anything else (measured, 0.5 and 0.29 us).
template <int C, int A, int B>
inline void tiles_stay_awake() {
#if !defined(TANDEM_EMULATE_TILES)
    tile_dot<C, A, B>();
#endif
}

// Tiles may be used while a value of this type lives. Releasing them keeps the thread's context switches small. Tiles may be
// shorter than 16 rows: an instruction takes the less time the fewer rows it has.
struct TileSession {
    TileSession() : TileSession(kTileRows, kTileRows) {}
    // Of two tiles of rows, with their sums.
    TileSession(int first_rows, int second_rows) : TileSession(TileConfiguration::of_grid(first_rows, second_rows)) {}
    explicit TileSession(const TileConfiguration& configuration) { tiles_configure(configuration); }
    ~TileSession() { tiles_release(); }
    TileSession(const TileSession&) = delete;
    TileSession& operator=(const TileSession&) = delete;
};

}  // namespace
