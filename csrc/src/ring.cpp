#include "ring.hpp"

#include <sys/mman.h>

#include "cuda.hpp"
#include "error.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace coldsnap {
namespace {

constexpr uint64_t kHugePage = 2 << 20;

struct Slab {
  std::mutex mutex;
  uint8_t* data = nullptr;
  uint64_t bytes = 0;
  bool registered = false;
} slab;

void unregister() {
  if (!slab.registered) return;
  slab.registered = false;
  cuda::table().host_unregister(slab.data);
}

void free_slab() {
  unregister();
  if (slab.data) munmap(slab.data, slab.bytes);
  slab.data = nullptr;
  slab.bytes = 0;
}

void allocate(uint64_t bytes) {
  bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  // Huge pages need aligned addresses: map more, keep the aligned part.
  void* mapped = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) fail(COLDSNAP_IO_MEMORY, "no " + std::to_string(bytes) + " bytes for the ring");
  auto* start = static_cast<uint8_t*>(mapped);
  const uint64_t head = -reinterpret_cast<uintptr_t>(start) & (kHugePage - 1);
  if (head) munmap(start, head);
  if (head != kHugePage) munmap(start + head + bytes, kHugePage - head);
  slab.data = start + head;
  slab.bytes = bytes;
  madvise(slab.data, bytes, MADV_HUGEPAGE);
  // A child that shared these pages would make the kernel copy them away from under the device.
  madvise(slab.data, bytes, MADV_DONTFORK);
  madvise(slab.data, bytes, MADV_POPULATE_WRITE);
}

void ensure_registered() {
  unsigned flags = 0;
  // A context that was reset has forgotten the registration.
  if (slab.registered && cuda::table().host_get_flags(&flags, slab.data)) slab.registered = false;
  if (slab.registered) return;
  cuda::check(cuda::table().host_register(slab.data, slab.bytes, cuda::kRegisterPortable), "page-locking the ring");
  slab.registered = true;
}

}  // namespace

Ring::Lease::Lease(uint64_t bytes, bool pinned) : lock_(slab.mutex) {
  if (slab.bytes < bytes) {
    free_slab();
    allocate(bytes);
  }
  if (pinned) ensure_registered();
}

uint8_t* Ring::Lease::data() const { return slab.data; }

void Ring::Lease::abandon() {
  slab.data = nullptr;
  slab.bytes = 0;
  slab.registered = false;
}

void Ring::release() {
  const std::lock_guard lock(slab.mutex);
  free_slab();
}

void Ring::statistics(uint64_t* bytes, uint64_t* registered) {
  const std::lock_guard lock(slab.mutex);
  *bytes = slab.bytes;
  *registered = slab.registered ? slab.bytes : 0;
}

}  // namespace coldsnap
