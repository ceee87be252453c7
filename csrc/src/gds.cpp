#include "gds.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/types.h>

#include <cstring>
#include <mutex>

#include "cuda.hpp"
#include "error.hpp"
#include "hydration.hpp"

namespace coldsnap {
namespace gds {
namespace {

// The types of cufile.h that cross the boundary, as its documentation lays them out.
struct Status {
  int error;
  cuda::Result driver;
};
struct Descriptor {
  int type;  // 1: a file descriptor
  union {
    int fd;
    void* handle;
  };
  const void* operations;
};
struct Properties {
  struct {
    unsigned major_version, minor_version;
    size_t poll_threshold, max_direct_io;
    unsigned status_flags, control_flags;
  } module;
  unsigned feature_flags, max_cache, per_buffer_cache, max_pinned, max_batch, max_batch_timeout;
  uint8_t later_versions[256];
};
using Handle = void*;

constexpr int kOpaqueFd = 1;
constexpr int kAllowCompatibilityMode = 1;

struct Table {
  Status (*driver_open)();
  Status (*driver_close)();
  Status (*properties)(Properties*);
  Status (*set_bool)(int parameter, bool value);  // absent before cuFile 1.14
  Status (*register_handle)(Handle*, Descriptor*);
  void (*deregister_handle)(Handle);
  ssize_t (*read)(Handle, void* base, size_t bytes, off_t file_offset, off_t base_offset);
};

struct Driver {
  std::mutex mutex;
  bool loaded = false, open = false;
  Table table{};
} driver;

[[noreturn]] void fail_cufile(const std::string& what, int error) {
  Error failure(COLDSNAP_IO_CUFILE, what + " (cuFile error " + std::to_string(error) + ")");
  failure.driver_error = error;
  throw failure;
}

template <typename Function>
void find(void* library, Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) fail(COLDSNAP_IO_UNAVAILABLE, std::string("libcufile has no ") + name);
}

void load_locked(const char* path) {
  void* library = dlopen(path ? path : "libcufile.so.0", RTLD_NOW | RTLD_LOCAL);
  if (!library) fail(COLDSNAP_IO_UNAVAILABLE, std::string("cuFile cannot be loaded: ") + dlerror());
  Table table{};
  find(library, table.driver_open, "cuFileDriverOpen");
  find(library, table.properties, "cuFileDriverGetProperties");
  find(library, table.register_handle, "cuFileHandleRegister");
  find(library, table.deregister_handle, "cuFileHandleDeregister");
  find(library, table.read, "cuFileRead");
  table.driver_close = reinterpret_cast<Status (*)()>(dlsym(library, "cuFileDriverClose"));
  table.set_bool = reinterpret_cast<Status (*)(int, bool)>(dlsym(library, "cuFileSetParameterBool"));
  driver.table = table;
  driver.loaded = true;
}

void open_locked() {
  if (!driver.loaded) load_locked(nullptr);
  if (driver.open) return;
  if (driver.table.set_bool) driver.table.set_bool(kAllowCompatibilityMode, false);
  if (const Status status = driver.table.driver_open(); status.error) {
    Error failure(COLDSNAP_IO_UNAVAILABLE, "cuFile cannot start (cuFile error " + std::to_string(status.error) + ")");
    failure.driver_error = status.error;
    throw failure;
  }
  driver.open = true;
}

// cuFile takes part in GPU transfers only through its kernel module; without it everything would pass through the host.
void check_module() {
  Properties properties{};
  driver.table.properties(&properties);
  if (!properties.module.major_version && !properties.module.minor_version)
    fail(COLDSNAP_IO_UNAVAILABLE, "the nvidia-fs kernel module is not loaded, so cuFile would copy through host memory");
}

class RegisteredFile {
 public:
  explicit RegisteredFile(int fd) {
    int error = 0;
    direct_ = reopen_direct(fd, O_RDONLY, &error);
    if (!direct_) fail_refused_direct(error);
    Descriptor descriptor{};
    descriptor.type = kOpaqueFd;
    descriptor.fd = direct_.get();
    if (const Status status = driver.table.register_handle(&handle_, &descriptor); status.error)
      fail_cufile("cuFile does not take this file", status.error);
  }
  ~RegisteredFile() { driver.table.deregister_handle(handle_); }
  RegisteredFile(const RegisteredFile&) = delete;
  RegisteredFile& operator=(const RegisteredFile&) = delete;

  void read(uint64_t address, uint64_t length, uint64_t offset) const {
    while (length) {
      const ssize_t done = driver.table.read(handle_, reinterpret_cast<void*>(address), length, static_cast<off_t>(offset), 0);
      if (done == -1) fail_errno("cuFile reading at offset " + std::to_string(offset));
      if (done < 0) fail_cufile("cuFile reading at offset " + std::to_string(offset), static_cast<int>(-done));
      if (done == 0) fail(COLDSNAP_IO_SHORT, "the file ended at offset " + std::to_string(offset));
      address += static_cast<uint64_t>(done);
      offset += static_cast<uint64_t>(done);
      length -= static_cast<uint64_t>(done);
    }
  }

 private:
  Fd direct_;
  Handle handle_ = nullptr;
};

void compare_block(int fd, const RegisteredFile& file) {
  const uint64_t length = std::min(kPage, file_size(fd));
  if (!length) return;
  std::vector<uint8_t> expected(length), arrived(length);
  read_exact(fd, expected.data(), length, 0);
  const cuda::Memory memory(length);
  file.read(memory.get(), length, 0);
  cuda::Stream stream;
  stream.to_host(arrived.data(), memory.get(), length);
  stream.synchronize();
  if (arrived != expected) fail(COLDSNAP_IO_UNAVAILABLE, "cuFile delivered other bytes than the file has");
}

}  // namespace

void load(const char* path) {
  const std::lock_guard lock(driver.mutex);
  if (driver.loaded && path) fail(COLDSNAP_IO_INVALID, "cuFile is loaded already; choose another before the first use");
  if (!driver.loaded) load_locked(path);
}

void check_available() {
  const std::lock_guard lock(driver.mutex);
  open_locked();
  check_module();
}

void probe(int fd, int cuda_device) {
  check_available();
  const cuda::Session session(cuda_device);
  compare_block(fd, RegisteredFile(fd));
}

void close_driver() {
  const std::lock_guard lock(driver.mutex);
  if (driver.open && driver.table.driver_close) driver.table.driver_close();
  driver.open = false;
}

}  // namespace gds

void hydrate_gds(Hydration& hydration, unsigned threads, Spent& spent) {
  for (const Segment& segment : hydration.layout.segments)
    if (hydration.digests.wants_crc(segment))
      fail(COLDSNAP_IO_INVALID, "gds cannot verify: its bytes never pass through host memory; verify the file before");
  gds::probe(hydration.source.fd(), hydration.options.cuda_device);
  const cuda::Session session(hydration.options.cuda_device);
  const gds::RegisteredFile file(hydration.source.fd());
  std::vector<Spent> parts(threads);
  run_workers(threads, hydration.failure, [&](unsigned index) {
    const cuda::Current current(session.context());
    Spent& mine = parts[index];
    hydration.for_each_slice([&](const Slice& slice) {
      const Stopwatch watch(mine.io);
      for (const Segment& segment : hydration.layout.of(slice)) file.read(segment.address, segment.length, segment.file_offset);
      mine.direct += slice.end - slice.start;
      mine.ranges.push_back({slice.start, slice.end - slice.start, COLDSNAP_IO_GDS, COLDSNAP_IO_REASON_REQUESTED});
    });
  });
  for (const Spent& part : parts) spent += part;
}

}  // namespace coldsnap
