// The CUDA driver's functions on host memory, so that the same library runs without a GPU.
//
// Streams are threads: a copy really happens later, so a stage that is used again too early is found out. Copies of
// memory that was not page-locked are counted, and calls can be made to fail at will.
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#define SHIM extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kInvalidValue = 1, kNoMemory = 2, kInvalidDevice = 101, kInvalidContext = 201, kAlreadyRegistered = 712,
              kNotRegistered = 713, kNotFound = 500, kAlreadyMapped = 208;

struct Context {
  int device;
  std::atomic<int> retained = 0;
};
Context contexts[2] = {{0}, {1}};
thread_local std::vector<Context*> current;

struct Counts {
  std::atomic<long> streams = 0, events = 0, registrations = 0, allocations = 0, copies = 0, copied_bytes = 0, pageable = 0, physical = 0;
} counts;

std::mutex streams_mutex;
std::mutex mutex;
std::map<uintptr_t, size_t> registered;
std::set<uintptr_t> backed;
std::string failing;
long failing_after = -1;
int failing_code = 0;
std::atomic<long> delay_us = 0;

int planned_failure(const char* name) {
  const std::lock_guard lock(mutex);
  if (failing != name || failing_after < 0) return 0;
  return failing_after-- == 0 ? failing_code : 0;
}

bool is_registered(const void* address, size_t bytes) {
  const std::lock_guard lock(mutex);
  auto found = registered.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (found == registered.begin()) return false;
  --found;
  return reinterpret_cast<uintptr_t>(address) + bytes <= found->first + found->second;
}

struct Stream {
  std::mutex lock;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  bool busy = false, ending = false;
  std::thread thread{[this] { run(); }};

  void run() {
    std::unique_lock held(lock);
    for (;;) {
      changed.wait(held, [&] { return ending || !work.empty(); });
      if (work.empty()) return;
      auto next = std::move(work.front());
      work.pop_front();
      busy = true;
      held.unlock();
      next();
      held.lock();
      busy = false;
      changed.notify_all();
    }
  }
  void push(std::function<void()> item) {
    const std::lock_guard held(lock);
    work.push_back(std::move(item));
    changed.notify_all();
  }
  void drain() {
    std::unique_lock held(lock);
    changed.wait(held, [&] { return work.empty() && !busy; });
  }
  ~Stream() {
    {
      const std::lock_guard held(lock);
      ending = true;
      changed.notify_all();
    }
    thread.join();
  }
};

std::vector<Stream*> streams;

struct Event {
  std::mutex lock;
  std::condition_variable changed;
  long recorded = 0, reached = 0;
};

// However this library was found: by its own name or the driver's.
void* self_handle() {
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(&self_handle), &info);
  return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
}

int queue_copy(void* to, const void* from, size_t bytes, const void* host, Stream* stream) {
  if (current.empty()) return kInvalidContext;
  if (!is_registered(host, bytes)) ++counts.pageable;
  ++counts.copies;
  counts.copied_bytes += static_cast<long>(bytes);
  stream->push([=] {
    if (const long wait = delay_us) std::this_thread::sleep_for(std::chrono::microseconds(wait));
    std::memcpy(to, from, bytes);
  });
  return 0;
}

}  // namespace

// Control

SHIM void shim_fail(const char* name, long after, int code) {
  const std::lock_guard lock(mutex);
  failing = name;
  failing_after = after;
  failing_code = code;
}
SHIM void shim_delay_us(long microseconds) { delay_us = microseconds; }
SHIM void shim_forget_registrations(void) {
  const std::lock_guard lock(mutex);
  counts.registrations -= static_cast<long>(registered.size());
  registered.clear();
}
// streams, events, registrations, allocations, retained contexts, copies, copied bytes, copies of pageable memory
SHIM void shim_counts(long out[8]) {
  out[0] = counts.streams;
  out[1] = counts.events;
  out[2] = counts.registrations;
  out[3] = counts.allocations;
  out[4] = contexts[0].retained + contexts[1].retained;
  out[5] = counts.copies;
  out[6] = counts.copied_bytes;
  out[7] = counts.pageable;
}

// The driver

#define FAIL_IF_PLANNED(name) \
  if (const int planned = planned_failure(name)) return planned

SHIM int cuInit(unsigned) { return planned_failure("cuInit"); }
SHIM int cuGetErrorName(int, const char** name) { return *name = "CUDA_ERROR_OF_THE_SHIM", 0; }
SHIM int cuGetErrorString(int, const char** text) { return *text = "made to fail", 0; }
SHIM int cuDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || ordinal > 1) return kInvalidDevice;
  *device = ordinal;
  return 0;
}
SHIM int cuDevicePrimaryCtxRetain(Context** context, int device) {
  FAIL_IF_PLANNED("cuDevicePrimaryCtxRetain");
  *context = &contexts[device];
  ++contexts[device].retained;
  return 0;
}
SHIM int cuDevicePrimaryCtxRelease_v2(int device) { return --contexts[device].retained, 0; }
SHIM int cuCtxPushCurrent_v2(Context* context) {
  FAIL_IF_PLANNED("cuCtxPushCurrent");
  return current.push_back(context), 0;
}
SHIM int cuCtxPopCurrent_v2(Context** context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return 0;
}
SHIM int cuStreamCreate(Stream** stream, unsigned) {
  FAIL_IF_PLANNED("cuStreamCreate");
  if (current.empty()) return kInvalidContext;
  *stream = new Stream;
  ++counts.streams;
  const std::lock_guard lock(streams_mutex);
  streams.push_back(*stream);
  return 0;
}
SHIM int cuStreamSynchronize(Stream* stream) {
  stream->drain();
  return planned_failure("cuStreamSynchronize");
}
SHIM int cuStreamDestroy_v2(Stream* stream) {
  {
    const std::lock_guard lock(streams_mutex);
    std::erase(streams, stream);
  }
  delete stream;
  --counts.streams;
  return 0;
}
SHIM int cuEventCreate(Event** event, unsigned) {
  FAIL_IF_PLANNED("cuEventCreate");
  *event = new Event;
  ++counts.events;
  return 0;
}
SHIM int cuEventRecord(Event* event, Stream* stream) {
  FAIL_IF_PLANNED("cuEventRecord");
  long number;
  {
    const std::lock_guard held(event->lock);
    number = ++event->recorded;
  }
  stream->push([event, number] {
    const std::lock_guard held(event->lock);
    event->reached = number;
    event->changed.notify_all();
  });
  return 0;
}
SHIM int cuEventSynchronize(Event* event) {
  FAIL_IF_PLANNED("cuEventSynchronize");
  std::unique_lock held(event->lock);
  event->changed.wait(held, [&] { return event->reached == event->recorded; });
  return 0;
}
SHIM int cuEventDestroy_v2(Event* event) {
  delete event;
  --counts.events;
  return 0;
}
SHIM int cuMemHostRegister_v2(void* address, size_t bytes, unsigned) {
  FAIL_IF_PLANNED("cuMemHostRegister");
  const auto start = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard lock(mutex);
  for (const auto& [other, size] : registered)
    if (start < other + size && other < start + bytes) return kAlreadyRegistered;
  registered[start] = bytes;
  ++counts.registrations;
  return 0;
}
SHIM int cuMemHostUnregister(void* address) {
  const std::lock_guard lock(mutex);
  if (!registered.erase(reinterpret_cast<uintptr_t>(address))) return kNotRegistered;
  --counts.registrations;
  return 0;
}
SHIM int cuMemHostGetFlags(unsigned* flags, void* address) {
  *flags = 0;
  return is_registered(address, 1) ? 0 : kInvalidValue;
}
SHIM int cuMemAlloc_v2(uintptr_t* address, size_t bytes) {
  FAIL_IF_PLANNED("cuMemAlloc");
  if (current.empty()) return kInvalidContext;
  *address = reinterpret_cast<uintptr_t>(std::malloc(bytes));
  ++counts.allocations;
  return *address ? 0 : kNoMemory;
}
SHIM int cuMemFree_v2(uintptr_t address) {
  std::free(reinterpret_cast<void*>(address));
  --counts.allocations;
  return 0;
}
SHIM int cuMemcpyHtoDAsync_v2(uintptr_t to, const void* from, size_t bytes, Stream* stream) {
  FAIL_IF_PLANNED("cuMemcpyHtoDAsync");
  return queue_copy(reinterpret_cast<void*>(to), from, bytes, from, stream);
}
SHIM int cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t bytes, Stream* stream) {
  FAIL_IF_PLANNED("cuMemcpyDtoHAsync");
  return queue_copy(to, reinterpret_cast<const void*>(from), bytes, to, stream);
}

// What cuda-bindings needs beyond that: it asks for every function by name.

SHIM int cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
  static void* self = self_handle();
  *function = nullptr;
  for (const char* suffix : {"_v2", ""})
    if (self && !*function) *function = dlsym(self, (std::string(name) + suffix).c_str());
  if (status) *status = *function ? 0 : 1;
  return *function ? 0 : kNotFound;
}
SHIM int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
SHIM int cuDeviceGetName(char* name, int length, int) { return std::snprintf(name, static_cast<size_t>(length), "Shim"), 0; }
SHIM int cuCtxSetCurrent(Context* context) {
  if (!current.empty()) current.pop_back();
  if (context) current.push_back(context);
  return 0;
}
SHIM int cuCtxSynchronize() {
  const std::lock_guard lock(streams_mutex);
  for (Stream* stream : streams) stream->drain();
  return 0;
}
SHIM int cuMemsetD8Async(uintptr_t address, unsigned char value, size_t bytes, Stream* stream) {
  stream->push([=] { std::memset(reinterpret_cast<void*>(address), value, bytes); });
  return 0;
}
SHIM int cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  *address = std::malloc(bytes);
  const std::lock_guard lock(mutex);
  registered[reinterpret_cast<uintptr_t>(*address)] = bytes;
  return 0;
}
SHIM int cuMemFreeHost(void* address) {
  const std::lock_guard lock(mutex);
  registered.erase(reinterpret_cast<uintptr_t>(address));
  std::free(address);
  return 0;
}

// Virtual memory management: ranges without access, files without names beneath them.

SHIM int cuMemGetAllocationGranularity(size_t* bytes, const void*, int) { return *bytes = 2 << 20, 0; }
SHIM int cuMemAddressReserve(uintptr_t* address, size_t bytes, size_t, uintptr_t, uint64_t) {
  void* mapped = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *address = reinterpret_cast<uintptr_t>(mapped);
  return mapped == MAP_FAILED ? kNoMemory : 0;
}
SHIM int cuMemAddressFree(uintptr_t address, size_t bytes) { return munmap(reinterpret_cast<void*>(address), bytes) ? kInvalidValue : 0; }
SHIM int cuMemCreate(uint64_t* handle, size_t bytes, const void*, uint64_t) {
  FAIL_IF_PLANNED("cuMemCreate");
  const int fd = memfd_create("physical", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes))) return kNoMemory;
  ++counts.allocations;
  counts.physical += static_cast<long>(bytes);
  return *handle = static_cast<uint64_t>(fd), 0;
}
SHIM int cuMemGetInfo_v2(size_t* free, size_t* total) {
  *total = size_t{1} << 40;
  *free = *total - static_cast<size_t>(counts.physical);
  return 0;
}
SHIM int cuMemRelease(uint64_t handle) {
  struct stat status;
  fstat(static_cast<int>(handle), &status);
  counts.physical -= status.st_size;
  --counts.allocations;
  return close(static_cast<int>(handle)) ? kInvalidValue : 0;
}
SHIM int cuMemMap(uintptr_t address, size_t bytes, size_t, uint64_t handle, uint64_t) {
  FAIL_IF_PLANNED("cuMemMap");
  const std::lock_guard lock(mutex);
  if (!backed.insert(address).second) return kAlreadyMapped;
  void* mapped = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, static_cast<int>(handle), 0);
  return mapped == MAP_FAILED ? kInvalidValue : 0;
}
SHIM int cuMemSetAccess(uintptr_t address, size_t bytes, const void*, size_t) {
  FAIL_IF_PLANNED("cuMemSetAccess");
  return mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE) ? kInvalidValue : 0;
}
SHIM int cuMemUnmap(uintptr_t address, size_t bytes) {
  const std::lock_guard lock(mutex);
  if (!backed.erase(address)) return kInvalidValue;
  void* mapped = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return mapped == MAP_FAILED ? kInvalidValue : 0;
}
