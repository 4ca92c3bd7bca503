#include "pages_ahead.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

namespace tandem {

namespace {

constexpr int kLowestPriority = 19;

// Somebody may be writing there: the byte is exchanged for itself in one operation, and only where it is 0, as in a page
// that was never touched.
void touch(uint8_t* byte) {
    uint8_t expected = 0;
    __atomic_compare_exchange_n(byte, &expected, 0, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

}  // namespace

PagesAhead::PagesAhead(uint8_t* memory, size_t num_bytes) : memory_(memory), num_bytes_(num_bytes) {
    sem_init(&wake_, 0, 0);
    thread_ = std::thread([this] { run(); });
}

PagesAhead::~PagesAhead() {
    stopping_.store(true);
    sem_post(&wake_);
    thread_.join();
    sem_destroy(&wake_);
}

void PagesAhead::reach(size_t num_bytes) {
    num_bytes = std::min(num_bytes, num_bytes_);
    size_t before = wanted_.load();
    while (before < num_bytes && !wanted_.compare_exchange_weak(before, num_bytes)) {
    }
    if (before < num_bytes) sem_post(&wake_);
}

void PagesAhead::run() {
    setpriority(PRIO_PROCESS, 0, kLowestPriority);  // on Linux: of this thread
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t touched = 0;
    for (;;) {
        while (touched < wanted_.load() && !stopping_.load()) {
            touch(memory_ + touched);
            touched += page;
            touched_.store(touched, std::memory_order_release);
        }
        if (stopping_.load()) return;
        while (sem_wait(&wake_) != 0) {
        }
    }
}

}  // namespace tandem
