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

// Whether it became more.
bool raise(std::atomic<size_t>& wanted, size_t num_bytes) {
    size_t before = wanted.load();
    while (before < num_bytes && !wanted.compare_exchange_weak(before, num_bytes)) {
    }
    return before < num_bytes;
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

void PagesAhead::reach(size_t now_bytes, size_t later_bytes) {
    const bool is_more_now = raise(wanted_now_, std::min(now_bytes, num_bytes_));
    const bool is_more_later = raise(wanted_later_, std::min(later_bytes, num_bytes_));
    if (is_more_now || is_more_later) sem_post(&wake_);
}

void PagesAhead::make_way(bool is_computing) {
    if (computing_.exchange(is_computing) && !is_computing) sem_post(&wake_);
}

void PagesAhead::run() {
    setpriority(PRIO_PROCESS, 0, kLowestPriority);  // on Linux: of this thread
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t touched = 0;
    for (;;) {
        while (touched < (computing_.load() ? wanted_now_ : wanted_later_).load() && !stopping_.load()) {
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
