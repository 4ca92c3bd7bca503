// Memory for packed weights: large runs on huge pages where the system gives them, freed together.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tandem {

class Arena {
  public:
    struct Range {
        uint8_t* address;
        size_t num_bytes;
        bool huge_pages;  // asked for and not refused
    };

    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena();

    // Zeroed memory, aligned to 64 bytes, valid until the arena dies. Throws std::bad_alloc.
    uint8_t* take(size_t num_bytes);

    size_t used_bytes() const { return used_; }
    const std::vector<Range>& ranges() const { return ranges_; }

  private:
    void grow(size_t num_bytes);

    std::vector<Range> ranges_;
    size_t offset_ = 0;  // in the last range
    size_t used_ = 0;
};

}  // namespace tandem
