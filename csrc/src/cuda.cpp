#include "cuda.hpp"

#include <dlfcn.h>

#include <mutex>
#include <string>
#include <utility>

#include "error.hpp"

namespace coldsnap::cuda {
namespace {

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;

struct Loader {
  std::mutex mutex;
  bool loaded = false;
  Table table{};
} loader;

template <typename Function>
void find(void* library, Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) fail(COLDSNAP_IO_UNAVAILABLE, std::string("the CUDA driver library has no ") + name);
}

void fill(void* library, Table& table) {
  find(library, table.init, "cuInit");
  find(library, table.get_error_name, "cuGetErrorName");
  find(library, table.get_error_string, "cuGetErrorString");
  find(library, table.device_get, "cuDeviceGet");
  find(library, table.primary_retain, "cuDevicePrimaryCtxRetain");
  find(library, table.primary_release, "cuDevicePrimaryCtxRelease_v2");
  find(library, table.push_current, "cuCtxPushCurrent_v2");
  find(library, table.pop_current, "cuCtxPopCurrent_v2");
  find(library, table.stream_create, "cuStreamCreate");
  find(library, table.stream_synchronize, "cuStreamSynchronize");
  find(library, table.stream_destroy, "cuStreamDestroy_v2");
  find(library, table.event_create, "cuEventCreate");
  find(library, table.event_record, "cuEventRecord");
  find(library, table.event_synchronize, "cuEventSynchronize");
  find(library, table.event_destroy, "cuEventDestroy_v2");
  find(library, table.host_register, "cuMemHostRegister_v2");
  find(library, table.host_unregister, "cuMemHostUnregister");
  find(library, table.host_get_flags, "cuMemHostGetFlags");
  find(library, table.allocate, "cuMemAlloc_v2");
  find(library, table.free, "cuMemFree_v2");
  find(library, table.copy_to_device, "cuMemcpyHtoDAsync_v2");
  find(library, table.copy_to_host, "cuMemcpyDtoHAsync_v2");
}

void load_locked(const char* path) {
  const char* name = path ? path : "libcuda.so.1";
  // Never closed: the driver keeps threads and exit handlers of its own.
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) fail(COLDSNAP_IO_UNAVAILABLE, std::string("the CUDA driver cannot be loaded: ") + dlerror());
  Table table{};
  fill(library, table);
  if (const Result result = table.init(0)) {
    Error failure(COLDSNAP_IO_UNAVAILABLE, "the CUDA driver finds no device (cuInit returned " + std::to_string(result) + ")");
    failure.driver_error = result;
    throw failure;
  }
  loader.table = table;
  loader.loaded = true;
}

}  // namespace

void load(const char* path) {
  const std::lock_guard lock(loader.mutex);
  if (loader.loaded && path) fail(COLDSNAP_IO_INVALID, "a CUDA driver is loaded already; choose another before the first use");
  if (!loader.loaded) load_locked(path);
}

const Table& table() {
  const std::lock_guard lock(loader.mutex);
  if (!loader.loaded) load_locked(nullptr);
  return loader.table;
}

void check(Result result, const char* what) {
  if (!result) return;
  const char *name = nullptr, *text = nullptr;
  loader.table.get_error_name(result, &name);
  loader.table.get_error_string(result, &text);
  Error failure(COLDSNAP_IO_CUDA, std::string(what) + ": " + (name ? name : "unknown CUDA error") + " (" +
                                      std::to_string(result) + "), " + (text ? text : "no description"));
  failure.driver_error = result;
  throw failure;
}

Session::Session(int ordinal) {
  check(table().device_get(&device_, ordinal), "no such CUDA device");
  check(table().primary_retain(&context_, device_), "the device's context cannot be used");
  if (const Result result = table().push_current(context_)) {
    table().primary_release(device_);
    check(result, "the device's context cannot be made current");
  }
}

Session::~Session() {
  Context popped;
  table().pop_current(&popped);
  table().primary_release(device_);
}

Current::Current(Context context) { check(table().push_current(context), "the device's context cannot be made current"); }

Current::~Current() {
  Context popped;
  table().pop_current(&popped);
}

Stream::Stream() { check(table().stream_create(&handle_, kStreamNonBlocking), "no stream for the copies"); }

Stream::~Stream() {
  table().stream_synchronize(handle_);
  table().stream_destroy(handle_);
}

void Stream::to_device(Pointer destination, const void* source, size_t bytes) {
  check(table().copy_to_device(destination, source, bytes, handle_), "copying to the device");
}

void Stream::to_host(void* destination, Pointer source, size_t bytes) {
  check(table().copy_to_host(destination, source, bytes, handle_), "copying from the device");
}

void Stream::synchronize() { check(table().stream_synchronize(handle_), "waiting for the copies"); }

Memory::Memory(size_t bytes) { check(table().allocate(&address_, bytes), "no device memory"); }

Memory::~Memory() { table().free(address_); }

Event::Event() { check(table().event_create(&handle_, kEventDisableTiming), "no event for a stage"); }

Event::Event(Event&& other) noexcept
    : handle_(std::exchange(other.handle_, nullptr)), recorded_(std::exchange(other.recorded_, false)) {}

Event::~Event() {
  if (handle_) table().event_destroy(handle_);
}

void Event::record(const Stream& stream) {
  check(table().event_record(handle_, stream.get()), "marking the end of a stage");
  recorded_ = true;
}

void Event::wait() {
  if (!std::exchange(recorded_, false)) return;
  check(table().event_synchronize(handle_), "waiting for a stage");
}

}  // namespace coldsnap::cuda
