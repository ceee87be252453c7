// Preloaded, it makes system calls of the library fail: after so many calls, with an error, or with less than was asked; or a
// disk that keeps other bytes than it was given.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <string>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace {

constexpr int kShort = -1, kEnd = -2, kFlip = -3;

struct Plan {
  std::atomic<long> after{-1}, times{0};
  std::atomic<int> error{0};
  // 0: let it through. Otherwise the error to make.
  int next() {
    if (times <= 0 || after-- > 0) return 0;
    return times-- > 0 ? error.load() : 0;
  }
};
Plan reads, writes, syncs, allocations, populations, direct_opens, cachestats;

Plan& plan(const char* name) {
  if (!std::strcmp(name, "preadv")) return reads;
  if (!std::strcmp(name, "pwritev")) return writes;
  if (!std::strcmp(name, "fdatasync")) return syncs;
  if (!std::strcmp(name, "fallocate")) return allocations;
  if (!std::strcmp(name, "populate")) return populations;
  if (!std::strcmp(name, "open_direct")) return direct_opens;
  if (!std::strcmp(name, "cachestat")) return cachestats;
  std::abort();
}

template <typename Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

using Vectored = ssize_t (*)(int, const iovec*, int, off64_t);

ssize_t moved(Plan& faults, int fd, const iovec* parts, int count, off64_t offset) {
  static const Vectored read = real<Vectored>("preadv64"), write = real<Vectored>("pwritev64");
  const Vectored function = &faults == &reads ? read : write;
  const int fault = faults.next();
  if (fault > 0) return errno = fault, -1;
  if (fault == kEnd) return 0;
  if (fault == kShort) {
    iovec first = parts[0];
    first.iov_len = (first.iov_len + 1) / 2;
    return function(fd, &first, 1, offset);
  }
  return function(fd, parts, count, offset);
}

using Sync = int (*)(int);

// Through a descriptor of its own: the library's may write only, or around the page cache.
int flip_middle_byte(int fd, Sync sync) {
  const int file = open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) std::abort();
  const off_t middle = lseek(file, 0, SEEK_END) / 2;
  unsigned char byte;
  if (pread(file, &byte, 1, middle) != 1) std::abort();
  byte ^= 4;
  if (pwrite(file, &byte, 1, middle) != 1) std::abort();
  const int status = sync(file);
  close(file);
  return status;
}

}  // namespace

// error: an errno, -1 for half of the first part, -2 for the end of the file, -3 (fdatasync) for a changed byte in its middle.
extern "C" void fault_plan(const char* name, long after, long times, int error) {
  Plan& faults = plan(name);
  faults.times = 0;
  faults.after = after;
  faults.error = error;
  faults.times = times;
}

extern "C" ssize_t preadv64(int fd, const iovec* parts, int count, off64_t offset) {
  return moved(reads, fd, parts, count, offset);
}
extern "C" ssize_t pwritev64(int fd, const iovec* parts, int count, off64_t offset) {
  return moved(writes, fd, parts, count, offset);
}
extern "C" int fdatasync(int fd) {
  static const Sync sync = real<Sync>("fdatasync");
  const int fault = syncs.next();
  if (fault > 0) return errno = fault, -1;
  const int status = sync(fd);
  return fault == kFlip && !status ? flip_middle_byte(fd, sync) : status;
}
extern "C" int fallocate64(int fd, int mode, off64_t offset, off64_t length) {
  if (const int fault = allocations.next()) return errno = fault, -1;
  return real<int (*)(int, int, off64_t, off64_t)>("fallocate64")(fd, mode, offset, length);
}
extern "C" int madvise(void* address, size_t length, int advice) noexcept {
  if (advice == MADV_POPULATE_READ)
    if (const int fault = populations.next()) return errno = fault, -1;
  static const auto function = real<int (*)(void*, size_t, int)>("madvise");
  return function(address, length, advice);
}
extern "C" int open64(const char* path, int flags, ...) {
  mode_t mode = 0;
  if (flags & (O_CREAT | O_TMPFILE)) {
    va_list rest;
    va_start(rest, flags);
    mode = va_arg(rest, mode_t);
    va_end(rest);
  }
  if (flags & O_DIRECT)
    if (const int fault = direct_opens.next()) return errno = fault, -1;
  static const auto function = real<int (*)(const char*, int, ...)>("open64");
  return function(path, flags, mode);
}
extern "C" long syscall(long number, ...) noexcept {
  va_list rest;
  va_start(rest, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(rest, long);
  va_end(rest);
  if (number == 451)
    if (const int fault = cachestats.next()) return errno = fault, -1;
  static const auto function = real<long (*)(long, ...)>("syscall");
  return function(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
}
