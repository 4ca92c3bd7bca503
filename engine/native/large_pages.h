// Memory for large buffers of a step: on huge pages where the system gives them. A product writes a column of many rows, each
// on another small page, and walks through activations of megabytes.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

namespace tandem {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kLeastOnHugePages = kHugePage / 2;  // what is smaller would leave most of a page unused

template <class T>
struct LargePageAllocator {
    using value_type = T;
    LargePageAllocator() = default;
    template <class Other>
    LargePageAllocator(const LargePageAllocator<Other>&) {}

    T* allocate(size_t count) {
        const bool is_large = count * sizeof(T) >= kLeastOnHugePages;
        const size_t unit = is_large ? kHugePage : 64, num_bytes = (count * sizeof(T) + unit - 1) / unit * unit;
        void* address = std::aligned_alloc(unit, num_bytes);
        if (!address) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        if (is_large) madvise(address, num_bytes, MADV_HUGEPAGE);  // refused: small pages do as well
#endif
        return (T*)address;
    }
    void deallocate(T* address, size_t) { std::free(address); }

    template <class Other>
    bool operator==(const LargePageAllocator<Other>&) const { return true; }
    template <class Other>
    bool operator!=(const LargePageAllocator<Other>&) const { return false; }
};

// Starts on a cache line.
template <class T>
using LargeVector = std::vector<T, LargePageAllocator<T>>;

}  // namespace tandem
