#include "thread_pool.h"

namespace tandem {

namespace {
// About 50 us of pauses: longer than any gap within a step, short beside the time between steps of an idle worker.
constexpr int kSpins = 1000;
// Then the waiting caller also gives way: on a machine with fewer free cores than threads a worker may not be running.
constexpr int kSpinsBeforeYield = 10000;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}
}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
    for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        started_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(const std::function<void(int)>& function) {
    function_ = &function;
    unfinished_.store((int)workers_.size());
    started_.fetch_add(1);  // sequentially consistent with the sleepers' check in wait_for_run
    if (sleepers_.load() > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    function(0);
    for (int spin = 0; unfinished_.load(std::memory_order_acquire) > 0; ++spin) {
        if (spin < kSpinsBeforeYield)
            pause();
        else
            std::this_thread::yield();
    }
}

bool ThreadPool::wait_for_run(uint64_t seen) {
    for (int spin = 0; spin < kSpins; ++spin) {
        if (started_.load(std::memory_order_acquire) != seen) return !stopping_;
        pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return started_.load() != seen; });
    sleepers_.fetch_sub(1);
    return !stopping_;
}

void ThreadPool::work(int thread) {
    for (uint64_t seen = 0; wait_for_run(seen);) {
        ++seen;
        (*function_)(thread);
        unfinished_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace tandem
