// A small persistent thread pool for one caller: every thread runs the same function, takes numbered tasks from a
// shared counter and meets at barriers.
//
// Threads spin for some microseconds, because a phase of a decode step lasts that long, and then sleep: an idle pool
// costs nothing, and a thread that has lost its core to another process is waited for without burning the other one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace lt {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
  public:
    explicit Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
        try {
            for (int i = 1; i < threads_; ++i) workers_.emplace_back([this, i] { work(i); });
        } catch (...) {  // the system gives no more threads: end those that run, or their destructors end the process
            stop();
            throw;
        }
    }

    ~Pool() { stop(); }

    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    /// Run fn(context, thread) on every thread, the caller being thread 0; returns when all are done.
    void run(void (*fn)(void*, int), void* context) {
        fn_ = fn;
        context_ = context;
        next_.store(0, std::memory_order_relaxed);
        publish();
        fn(context, 0);
        barrier();
    }

    /// The next task number of this phase.
    int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

    /// Wait for all threads, then start a new phase with task 0.
    void barrier() {
        if (threads_ == 1) {
            next_.store(0, std::memory_order_relaxed);
            return;
        }
        const uint32_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            advance(phase_);
        } else {
            await(phase_, phase);
        }
    }

  private:
    static constexpr int SPINS = 1500;
    static constexpr int YIELDS = 20;

    void publish() { advance(job_); }

    void stop() {
        stop_.store(true);
        publish();
        for (std::thread& t : workers_) t.join();
    }

    void advance(std::atomic<uint32_t>& word) {
        word.fetch_add(1, std::memory_order_seq_cst);
        // Pairs with the increment in await(): either the sleeper sees the new word, or we see the sleeper.
        if (sleepers_.load(std::memory_order_seq_cst) > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
    }

    void await(const std::atomic<uint32_t>& word, uint32_t old) {
        for (int i = 0; i < SPINS; ++i) {
            if (word.load(std::memory_order_acquire) != old) return;
            relax();
        }
        for (int i = 0; i < YIELDS; ++i) {
            if (word.load(std::memory_order_acquire) != old) return;
            std::this_thread::yield();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return word.load(std::memory_order_seq_cst) != old; });
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }

    void work(int index) {
        uint32_t seen = 0;
        for (;;) {
            await(job_, seen);
            seen = job_.load(std::memory_order_acquire);
            if (stop_.load()) return;
            fn_(context_, index);
            barrier();
        }
    }

    const int threads_;
    void (*fn_)(void*, int) = nullptr;
    void* context_ = nullptr;
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    alignas(64) std::atomic<uint32_t> job_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::vector<std::thread> workers_;
};

}  // namespace lt
