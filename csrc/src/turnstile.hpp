// The digest of a whole file whose slices are written by many threads: they come one after the other, in file order.
#pragma once

#include <condition_variable>
#include <mutex>

#include "checksum.hpp"
#include "layout.hpp"

namespace coldsnap {

class Turnstile {
 public:
  // Waits for the slices before this one, then calls `body(sum)`. False, without calling it, when another thread gave up.
  template <typename Body>
  bool pass(uint64_t index, const Slice& slice, Body&& body) {
    std::unique_lock lock(mutex_);
    turned_.wait(lock, [&] { return next_ == index || given_up_; });
    if (given_up_) return false;
    lock.unlock();  // the turn itself keeps the others out
    sum_.update_zeros(slice.start - position_);
    body(sum_);
    position_ = slice.end;
    lock.lock();
    ++next_;
    turned_.notify_all();
    return true;
  }

  void give_up() {
    const std::lock_guard lock(mutex_);
    given_up_ = true;
    turned_.notify_all();
  }

  Sha256Digest finish(uint64_t file_bytes) {
    sum_.update_zeros(file_bytes - position_);
    return sum_.finish();
  }

 private:
  std::mutex mutex_;
  std::condition_variable turned_;
  uint64_t next_ = 0, position_ = 0;
  bool given_up_ = false;
  Sha256 sum_;
};

}  // namespace coldsnap
