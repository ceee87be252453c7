// A buffer of one thread, for bytes on their way.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <string>

#include "error.hpp"

namespace coldsnap {

// Page-aligned memory of one thread, taken when first needed.
class Scratch {
 public:
  explicit Scratch(uint64_t bytes) : bytes_(bytes) {}
  ~Scratch() {
    if (data_) munmap(data_, bytes_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  uint8_t* get() {
    if (data_) return data_;
    void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) fail(COLDSNAP_IO_MEMORY, "no " + std::to_string(bytes_) + " bytes for a thread's buffer");
    madvise(mapped, bytes_, MADV_HUGEPAGE);
    return data_ = static_cast<uint8_t*>(mapped);
  }

 private:
  uint64_t bytes_;
  uint8_t* data_ = nullptr;
};

}  // namespace coldsnap
