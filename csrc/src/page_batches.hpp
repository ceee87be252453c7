// What packing and unpacking of page images share: where blocks and batches lie, and threads that wait for one another.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <mutex>

#include "coldsnap_io.h"
#include "error.hpp"
#include "file.hpp"
#include "lz4.hpp"
#include "workers.hpp"

namespace coldsnap {

inline constexpr uint64_t kBatch = uint64_t{4} << 20;  // raw bytes that one thread takes at once
inline constexpr unsigned kMaxImageWorkers = 256;

class Geometry {
 public:
  explicit Geometry(const coldsnap_io_image& image) : image_(image) {
    if (image.abi != COLDSNAP_IO_ABI) fail(COLDSNAP_IO_INVALID, "options of another interface version");
    if (!image.block_bytes || image.block_bytes % kPage || image.block_bytes > lz4::kMaxBlock)
      fail(COLDSNAP_IO_INVALID, "a block has a multiple of 4096 bytes, at most 4 MiB");
    if (image.alignment != 1 && image.alignment != kPage) fail(COLDSNAP_IO_INVALID, "payloads are aligned to 1 or to 4096 bytes");
    if (image.payload_offset % kPage) fail(COLDSNAP_IO_INVALID, "payloads start at a multiple of 4096");
    if (image.raw_bytes % kPage) fail(COLDSNAP_IO_INVALID, "an image has whole pages");
    if (!image.workers || image.workers > kMaxImageWorkers || !image.acceleration || image.acceleration > 65537 || image.reserved)
      fail(COLDSNAP_IO_INVALID, "workers, acceleration or reserved out of range");
  }

  uint64_t blocks() const { return (image_.raw_bytes + image_.block_bytes - 1) / image_.block_bytes; }
  uint64_t blocks_in_batch() const { return std::max<uint64_t>(1, kBatch / image_.block_bytes); }
  uint64_t batches() const { return (blocks() + blocks_in_batch() - 1) / blocks_in_batch(); }
  uint64_t batch_bytes() const { return blocks_in_batch() * image_.block_bytes; }
  uint64_t first_block(uint64_t batch) const { return batch * blocks_in_batch(); }
  uint64_t end_block(uint64_t batch) const { return std::min(blocks(), first_block(batch + 1)); }
  uint64_t raw_at(uint64_t block) const { return std::min(image_.raw_bytes, block * image_.block_bytes); }
  uint64_t raw_length(uint64_t block) const { return raw_at(block + 1) - raw_at(block); }
  uint64_t padded(uint64_t length) const { return (length + image_.alignment - 1) / image_.alignment * image_.alignment; }

 private:
  const coldsnap_io_image& image_;
};

// Threads that wait for one another, and leave when one of them has failed.
class Meeting {
 public:
  // Waits until `ready()`, then runs `body()`, both under the lock. False, without running it, when somebody gave up.
  template <typename Ready, typename Body>
  bool when(Ready&& ready, Body&& body) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return given_up_ || ready(); });
    if (given_up_) return false;
    body();
    changed_.notify_all();
    return true;
  }

  void give_up() {
    const std::lock_guard lock(mutex_);
    given_up_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool given_up_ = false;
};

inline void run_together(unsigned count, Meeting& meeting, const std::function<void(unsigned)>& body) {
  FirstFailure failure;
  run_workers(count, failure, [&](unsigned index) {
    try {
      if (failure.stop()) meeting.give_up();  // a thread could not be started: the others must not wait for it
      body(index);
    } catch (...) {
      failure.take(std::current_exception());  // first of all: the others only leave because of it
      meeting.give_up();
      throw;
    }
    if (failure.stop()) meeting.give_up();
  });
}

}  // namespace coldsnap
