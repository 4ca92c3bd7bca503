// Copies a frame's runs and takes their digest in the same pass: each 64 bytes are loaded once, digested and stored.
//
// The digest is xxh3-128 (seed 0, default secret) of all runs, one after the other, as `xxhash.xxh3_128` gives it; the
// algorithm is Yann Collet's, from the specification and `xxhash.h` 0.8. What is digested is what was stored: a peer
// that changes shared memory meanwhile cannot have one thing checked and another one copied.
//
// Runs have a multiple of 64 bytes each and more than 240 together; whoever has others uses the library.
//
// Nothing is prefetched by hand: 0.5 to 8 KiB ahead was 10 to 35 % slower than what the processor does by itself.

#include <algorithm>
#include <cstdint>
#include <cstring>

// TANDEM_PORTABLE and TANDEM_NO_AVX512 are for tests of what other processors run.
#if defined(__x86_64__) && !defined(TANDEM_PORTABLE)
#include <immintrin.h>
#define TANDEM_X86 1
#endif

namespace {

constexpr int64_t kStripe = 64;
constexpr int64_t kStripesPerBlock = 16;  // (secret - stripe) / 8
constexpr int64_t kShortest = 240;    // up to here xxh3 is another function

constexpr uint32_t kPrime32_1 = 0x9E3779B1U, kPrime32_2 = 0x85EBCA77U, kPrime32_3 = 0xC2B2AE3DU;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87ULL, kPrime64_2 = 0xC2B2AE3D27D4EB4FULL,
                   kPrime64_3 = 0x165667B19E3779F9ULL, kPrime64_4 = 0x85EBCA77C2B2AE63ULL,
                   kPrime64_5 = 0x27D4EB2F165667C5ULL;

alignas(64) const uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
constexpr int kSecretBytes = 192;
constexpr int kScrambleAt = kSecretBytes - 64, kLastStripeAt = kSecretBytes - 64 - 7, kLowAt = 11,
              kHighAt = kSecretBytes - 64 - 11;

uint64_t read64(const uint8_t* bytes) {
  uint64_t value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

uint64_t fold_product(uint64_t left, uint64_t right) {
  const unsigned __int128 product = static_cast<unsigned __int128>(left) * right;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t merge(const uint64_t* sums, const uint8_t* secret, uint64_t start) {
  for (int i = 0; i < 8; i += 2)
    start += fold_product(sums[i] ^ read64(secret + 8 * i), sums[i + 1] ^ read64(secret + 8 * i + 8));
  start ^= start >> 37;
  start *= 0x165667919E3779F9ULL;
  return start ^ (start >> 32);
}

void write_big_endian(uint64_t value, uint8_t* out) {
  for (int i = 0; i < 8; ++i) out[i] = static_cast<uint8_t>(value >> (56 - 8 * i));
}

enum class Store { kCached, kStreaming };

// The eight running sums, in one register where there is one that wide. `Lanes` loads, stores and mixes 64 bytes.
struct PortableLanes {
  uint64_t sums[8];

  template <Store store>
  void mix(const uint8_t* from, uint8_t* to, const uint8_t* secret) {
    uint64_t values[8];
    std::memcpy(values, from, sizeof values);
    std::memcpy(to, values, sizeof values);
    for (int i = 0; i < 8; ++i) {
      const uint64_t keyed = values[i] ^ read64(secret + 8 * i);
      sums[i ^ 1] += values[i];
      sums[i] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
    }
  }

  void scramble() {
    for (int i = 0; i < 8; ++i)
      sums[i] = (sums[i] ^ (sums[i] >> 47) ^ read64(kSecret + kScrambleAt + 8 * i)) * kPrime32_1;
  }

  void load(const uint64_t* from) { std::memcpy(sums, from, sizeof sums); }
  void save(uint64_t* to) const { std::memcpy(to, sums, sizeof sums); }
  static void fence() {}
};

#if TANDEM_X86
#define AVX512 __attribute__((target("avx512f"), always_inline)) inline
#define AVX2 __attribute__((target("avx2"), always_inline)) inline

struct Avx512Lanes {
  __m512i sums;

  template <Store store>
  AVX512 void mix(const uint8_t* from, uint8_t* to, const uint8_t* secret) {
    const __m512i values = _mm512_loadu_si512(from);
    if constexpr (store == Store::kCached) _mm512_storeu_si512(to, values);
    if constexpr (store == Store::kStreaming) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), values);
    const __m512i keyed = _mm512_xor_si512(values, _mm512_loadu_si512(secret));
    const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    const __m512i swapped = _mm512_shuffle_epi32(values, _MM_PERM_BADC);
    sums = _mm512_add_epi64(product, _mm512_add_epi64(sums, swapped));
  }

  AVX512 void scramble() {
    const __m512i prime = _mm512_set1_epi64(kPrime32_1);
    const __m512i key = _mm512_loadu_si512(kSecret + kScrambleAt);
    const __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(sums, _mm512_srli_epi64(sums, 47)), key);
    const __m512i low = _mm512_mul_epu32(mixed, prime);
    const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
    sums = _mm512_add_epi64(low, _mm512_slli_epi64(high, 32));
  }

  AVX512 void load(const uint64_t* from) { sums = _mm512_loadu_si512(from); }
  AVX512 void save(uint64_t* to) const { _mm512_storeu_si512(to, sums); }
  AVX512 static void fence() { _mm_sfence(); }
};

struct Avx2Lanes {
  __m256i sums[2];

  template <Store store>
  AVX2 void mix(const uint8_t* from, uint8_t* to, const uint8_t* secret) {
    for (int half = 0; half < 2; ++half) {
      const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + half);
      if constexpr (store == Store::kCached) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + half, values);
      if constexpr (store == Store::kStreaming) _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + half, values);
      const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret) + half);
      const __m256i keyed = _mm256_xor_si256(values, key);
      const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
      const __m256i swapped = _mm256_shuffle_epi32(values, _MM_SHUFFLE(1, 0, 3, 2));
      sums[half] = _mm256_add_epi64(product, _mm256_add_epi64(sums[half], swapped));
    }
  }

  AVX2 void scramble() {
    const __m256i prime = _mm256_set1_epi64x(kPrime32_1);
    for (int half = 0; half < 2; ++half) {
      const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kSecret + kScrambleAt) + half);
      const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(sums[half], _mm256_srli_epi64(sums[half], 47)), key);
      const __m256i low = _mm256_mul_epu32(mixed, prime);
      const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
      sums[half] = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
    }
  }

  AVX2 void load(const uint64_t* from) {
    sums[0] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    sums[1] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + 1);
  }
  AVX2 void save(uint64_t* to) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), sums[0]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + 1, sums[1]);
  }
  AVX2 static void fence() { _mm_sfence(); }
};
#endif

// Where runs begin: `places[i] * stride` bytes behind `base`.
struct Runs {
  uint8_t* base;
  const int64_t* places;
  int64_t stride;

  uint8_t* at(int64_t run) const { return base + places[run] * stride; }
};

struct Frame {
  Runs sources, targets;
  int64_t num_runs, run_bytes;
};

// The body of every variant; a macro because a template does not carry its caller's instruction set. The last stripe of
// all has a key of its own; after each block of 16 the sums are scrambled, unless nothing but the last stripe follows.
#define TANDEM_COPY_FRAME(Lanes)                                                                 \
  Lanes lanes;                                                                                   \
  lanes.load(sums);                                                                              \
  int64_t before_last = frame.num_runs * frame.run_bytes / kStripe - 1;                          \
  int64_t in_block = 0;                                                                          \
  for (int64_t run = 0; run < frame.num_runs; ++run) {                                           \
    const uint8_t* from = frame.sources.at(run);                                                 \
    uint8_t* to = frame.targets.at(run);                                                         \
    for (int64_t left = frame.run_bytes / kStripe; left > 0;) {                                  \
      if (before_last == 0) {                                                                    \
        lanes.template mix<store>(from, to, kSecret + kLastStripeAt);                            \
        break;                                                                                   \
      }                                                                                          \
      const int64_t count = std::min({kStripesPerBlock - in_block, left, before_last});          \
      for (int64_t i = 0; i < count; ++i, from += kStripe, to += kStripe)                        \
        lanes.template mix<store>(from, to, kSecret + 8 * (in_block + i));                       \
      left -= count, before_last -= count, in_block += count;                                    \
      if (in_block == kStripesPerBlock) lanes.scramble(), in_block = 0;                          \
    }                                                                                            \
  }                                                                                              \
  lanes.save(sums);                                                                              \
  if (store == Store::kStreaming) Lanes::fence();

template <Store store>
void copy_portable(const Frame& frame, uint64_t* sums) {
  TANDEM_COPY_FRAME(PortableLanes)
}

#if TANDEM_X86
template <Store store>
__attribute__((target("avx512f"))) void copy_avx512(const Frame& frame, uint64_t* sums) {
  TANDEM_COPY_FRAME(Avx512Lanes)
}

template <Store store>
__attribute__((target("avx2"))) void copy_avx2(const Frame& frame, uint64_t* sums) {
  TANDEM_COPY_FRAME(Avx2Lanes)
}
#endif

template <Store store>
void copy_frame(const Frame& frame, uint64_t* sums) {
#if TANDEM_X86
#if !defined(TANDEM_NO_AVX512)
  if (__builtin_cpu_supports("avx512f")) return copy_avx512<store>(frame, sums);
#endif
  if (__builtin_cpu_supports("avx2")) return copy_avx2<store>(frame, sums);
#endif
  copy_portable<store>(frame, sums);
}

bool is_aligned(const Frame& frame) {
  for (int64_t run = 0; run < frame.num_runs; ++run)
    if (reinterpret_cast<uintptr_t>(frame.targets.at(run)) % kStripe) return false;
  return true;
}

}  // namespace

// Copies `num_runs` runs of `run_bytes` each from one buffer's places to another's, and writes the 16 bytes of the digest
// of all of them. `past_caches`: targets are written around the caches, where all are aligned to 64 bytes.
// Returns 0, or -1 when the runs are not of the kind that is served here: nothing is written then.
extern "C" __attribute__((visibility("default"))) int32_t tandem_copy_frame(
    uint8_t* source, const int64_t* source_places, int64_t source_stride, uint8_t* target, const int64_t* target_places,
    int64_t target_stride, int64_t num_runs, int64_t run_bytes, int32_t past_caches, uint8_t* digest) {
  const Frame frame{{source, source_places, source_stride}, {target, target_places, target_stride}, num_runs, run_bytes};
  if (run_bytes <= 0 || run_bytes % kStripe || num_runs * run_bytes <= kShortest) return -1;
  uint64_t sums[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  if (past_caches && is_aligned(frame))
    copy_frame<Store::kStreaming>(frame, sums);
  else
    copy_frame<Store::kCached>(frame, sums);
  const uint64_t num_bytes = static_cast<uint64_t>(num_runs * run_bytes);
  write_big_endian(merge(sums, kSecret + kHighAt, ~(num_bytes * kPrime64_2)), digest);
  write_big_endian(merge(sums, kSecret + kLowAt, num_bytes * kPrime64_1), digest + 8);
  return 0;
}
