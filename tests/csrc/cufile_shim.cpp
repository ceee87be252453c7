// cuFile's functions on host memory: what a machine with the nvidia-fs module offers, and what one without it does.
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

#define SHIM extern "C" __attribute__((visibility("default")))

namespace {
struct Status {
  int error, driver;
};
struct Descriptor {
  int type;
  union {
    int fd;
    void* handle;
  };
  const void* operations;
};
std::atomic<int> module_version = 2, register_error = 0, garble = 0;
std::atomic<long> handles = 0, reads = 0, fail_read_after = -1;
}  // namespace

SHIM void shim_module(int major_version) { module_version = major_version; }
SHIM void shim_register_error(int error) { register_error = error; }
SHIM void shim_garble(int on) { garble = on; }
SHIM void shim_fail_read(long after) { fail_read_after = after; }
SHIM long shim_handles(void) { return handles; }
SHIM long shim_reads(void) { return reads; }

SHIM Status cuFileDriverOpen(void) { return {0, 0}; }
SHIM Status cuFileDriverClose(void) { return {0, 0}; }
SHIM Status cuFileDriverGetProperties(unsigned* properties) {
  properties[0] = static_cast<unsigned>(module_version.load());
  return {0, 0};
}
SHIM Status cuFileHandleRegister(void** handle, Descriptor* descriptor) {
  if (const int error = register_error) return {error, 0};
  *handle = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor->fd));
  ++handles;
  return {0, 0};
}
SHIM void cuFileHandleDeregister(void*) { --handles; }
SHIM ssize_t cuFileRead(void* handle, void* base, size_t bytes, off_t file_offset, off_t base_offset) {
  ++reads;
  if (fail_read_after >= 0 && fail_read_after-- == 0) return -5017;
  // The real one takes any offset; a direct descriptor underneath does not.
  const int fd = static_cast<int>(reinterpret_cast<intptr_t>(handle));
  static thread_local char block[2 * 4096] __attribute__((aligned(4096)));
  auto* to = static_cast<char*>(base) + base_offset;
  const off_t start = file_offset & ~off_t{4095};
  const ssize_t got = pread(fd, block, 4096, start);
  if (got < 0) return -1;
  const size_t skip = static_cast<size_t>(file_offset - start);
  if (static_cast<size_t>(got) <= skip) return 0;
  size_t take = static_cast<size_t>(got) - skip;
  if (take > bytes) take = bytes;
  std::memcpy(to, block + skip, take);
  if (garble && take) to[0] = static_cast<char>(to[0] + 1);
  return static_cast<ssize_t>(take);
}
