// Memory that is about to be written, made resident by a thread of its own: a page's first touch is the system's work
// (clearing it, and under a hypervisor often getting it from the host), which a step or an arriving frame would wait for.
#pragma once
#include <semaphore.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace tandem {

class PagesAhead {
  public:
    // Throws std::system_error where there is no thread to have. The memory must stay mapped while this lives.
    PagesAhead(uint8_t* memory, size_t num_bytes);
    PagesAhead(const PagesAhead&) = delete;
    PagesAhead& operator=(const PagesAhead&) = delete;
    ~PagesAhead();  // waits for the page in hand

    // The first `now_bytes` shall be resident soon, the first `later_bytes` when nobody computes. Waits for nothing: the
    // thread's priority is low and it may be anywhere.
    void reach(size_t now_bytes, size_t later_bytes);

    // Somebody computes for whom a processor is better kept free, or nobody does (as at the start).
    void make_way(bool is_computing);

    size_t touched_bytes() const { return touched_.load(std::memory_order_acquire); }

  private:
    void run();

    uint8_t* const memory_;
    const size_t num_bytes_;
    std::atomic<size_t> wanted_now_{0}, wanted_later_{0}, touched_{0};
    std::atomic<bool> computing_{false}, stopping_{false};
    sem_t wake_;
    std::thread thread_;
};

}  // namespace tandem
