// The ring: one bounded slab of host memory a process, page-locked once, lent to one transfer at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

namespace coldsnap {

class Ring {
 public:
  // Exclusive use of at least `bytes`, aligned to a page. With `pinned`, page-locked for the driver; a context of the device
  // must be current. A second transfer waits: two would only share the link and the disk, with twice the memory.
  class Lease {
   public:
    Lease(uint64_t bytes, bool pinned);
    uint8_t* data() const;
    // The device may still write to the slab, or read it: it must never be used again, nor given back to the system.
    void abandon();

   private:
    std::unique_lock<std::mutex> lock_;
  };

  static void release();
  static void statistics(uint64_t* bytes, uint64_t* registered);
};

}  // namespace coldsnap
