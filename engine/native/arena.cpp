#include "arena.h"

#include <sys/mman.h>

#include <new>

#include "large_pages.h"

namespace tandem {

namespace {
constexpr size_t kLeastRange = size_t(32) << 20;
// Kernels prefetch up to this far past what they read; a range ends with it so that no page fault walk is wasted.
constexpr size_t kSlack = size_t(64) << 10;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }
}  // namespace

Arena::~Arena() {
    for (const Range& range : ranges_) munmap(range.address, range.num_bytes);
}

uint8_t* Arena::take(size_t num_bytes) {
    num_bytes = round_up(num_bytes, 64);
    if (ranges_.empty() || offset_ + num_bytes + kSlack > ranges_.back().num_bytes) grow(num_bytes + kSlack);
    uint8_t* taken = ranges_.back().address + offset_;
    offset_ += num_bytes;
    used_ += num_bytes;
    return taken;
}

void Arena::grow(size_t num_bytes) {
    const size_t size = round_up(num_bytes > kLeastRange ? num_bytes : kLeastRange, kHugePage);
    void* mapped = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    uint8_t* start = (uint8_t*)mapped;
    uint8_t* aligned = (uint8_t*)round_up((size_t)start, kHugePage);
    if (aligned > start) munmap(start, (size_t)(aligned - start));
    const size_t behind = (size_t)(start + size + kHugePage - (aligned + size));
    if (behind) munmap(aligned + size, behind);
    bool huge_pages = false;
#ifdef MADV_HUGEPAGE
    huge_pages = madvise(aligned, size, MADV_HUGEPAGE) == 0;
#endif
    ranges_.push_back({aligned, size, huge_pages});
    offset_ = 0;
}

}  // namespace tandem
