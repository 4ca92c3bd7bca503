// A fixed set of threads that run one function together, many times a step.
//
// Between runs a worker spins for a bounded time, because the next operation of a step comes within microseconds, then
// sleeps. With one thread there is no pool: run() is a call.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tandem {

class ThreadPool {
  public:
    explicit ThreadPool(int num_threads);
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;
    ~ThreadPool();

    int size() const { return num_threads_; }

    // Calls function(thread) for each thread in [0, size()) and returns when all have returned. The caller is thread 0.
    void run(const std::function<void(int)>& function);

    // Splits [0, count) into one run of neighbours for each thread: function(first, last, thread).
    template <class Function>
    void split(int count, const Function& function) {
        if (num_threads_ == 1 || count < 2) {
            if (count > 0) function(0, count, 0);
            return;
        }
        run([&](int thread) {
            const int first = (int)((int64_t)count * thread / num_threads_);
            const int last = (int)((int64_t)count * (thread + 1) / num_threads_);
            if (first < last) function(first, last, thread);
        });
    }

    // As split, but each thread takes the next index when it is free: for pieces of unequal size.
    template <class Function>
    void take_turns(int count, const Function& function) {
        if (num_threads_ == 1 || count < 2) {
            for (int i = 0; i < count; ++i) function(i, 0);
            return;
        }
        std::atomic<int> next{0};
        run([&](int thread) {
            for (int i = next.fetch_add(1); i < count; i = next.fetch_add(1)) function(i, thread);
        });
    }

  private:
    void work(int thread);
    bool wait_for_run(uint64_t seen);

    const int num_threads_;
    std::vector<std::thread> workers_;
    const std::function<void(int)>* function_ = nullptr;
    std::atomic<uint64_t> started_{0};
    std::atomic<int> unfinished_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
};

}  // namespace tandem
