// Threads of one transfer: started, joined and forgotten inside the call.
#pragma once

#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "error.hpp"

namespace coldsnap {

// The first failure of several threads; the others see stop() and leave.
class FirstFailure {
 public:
  bool stop() const { return stop_.load(std::memory_order_relaxed); }
  void take(std::exception_ptr failure) noexcept {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
    stop_.store(true, std::memory_order_relaxed);
  }
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;
  std::exception_ptr failure_;
};

inline unsigned usable_processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) ? 1u : static_cast<unsigned>(CPU_COUNT(&set));
}

// Run body(0) to body(count - 1) at once, the first on the calling thread. Returns when all have ended; throws the first failure.
inline void run_workers(unsigned count, FirstFailure& failure, const std::function<void(unsigned)>& body) {
  const auto guarded = [&](unsigned index) {
    try {
      body(index);
    } catch (...) {
      failure.take(std::current_exception());
    }
  };
  // Signals belong to the caller's threads: Python's handlers must not run here.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::vector<std::jthread> threads;
  try {
    for (unsigned index = 1; index < count; ++index) threads.emplace_back(guarded, index);
  } catch (const std::system_error& error) {
    failure.take(std::make_exception_ptr(
        Error(COLDSNAP_IO_SYSTEM, "thread " + std::to_string(threads.size() + 1) + " of a transfer cannot be started")));
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  guarded(0);
  threads.clear();
  failure.rethrow();
}

}  // namespace coldsnap
