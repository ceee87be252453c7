#include "file.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <vector>

#include "error.hpp"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace coldsnap {
namespace {

constexpr long kSysCachestat = 451;  // the same on every architecture

struct CachestatRange {
  uint64_t offset, length;
};
struct Cachestat {
  uint64_t cached, dirty, writeback, evicted, recently_evicted;
};

std::string place(uint64_t offset, uint64_t length) {
  return std::to_string(length) + " bytes at offset " + std::to_string(offset);
}

uint64_t total(const iovec* parts, int count) {
  uint64_t bytes = 0;
  for (int i = 0; i < count; ++i) bytes += parts[i].iov_len;
  return bytes;
}

void advance(iovec*& parts, int& count, size_t done) {
  for (; count && done >= parts->iov_len; ++parts, --count) done -= parts->iov_len;
  if (count) {
    parts->iov_base = static_cast<uint8_t*>(parts->iov_base) + done;
    parts->iov_len -= done;
  }
}

std::optional<uint64_t> resident_by_mincore(int fd, uint64_t offset, uint64_t length) {
  const uint64_t start = round_down(offset), bytes = offset + length - start;
  void* mapped = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(start));
  if (mapped == MAP_FAILED) return std::nullopt;
  std::vector<unsigned char> pages((bytes + kPage - 1) / kPage);
  const bool known = mincore(mapped, bytes, pages.data()) == 0;
  munmap(mapped, bytes);
  if (!known) return std::nullopt;
  return static_cast<uint64_t>(std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1; }));
}

}  // namespace

uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

Fd& Fd::operator=(Fd&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

uint64_t file_size(int fd) {
  struct stat status;
  if (fstat(fd, &status)) fail_errno("the file cannot be inspected");
  if (!S_ISREG(status.st_mode)) fail(COLDSNAP_IO_INVALID, "the descriptor is not that of a regular file");
  return static_cast<uint64_t>(status.st_size);
}

Fd reopen_direct(int fd, int access_mode, int* error) {
  const std::string self = "/proc/self/fd/" + std::to_string(fd);
  Fd direct(open(self.c_str(), access_mode | O_DIRECT | O_CLOEXEC));
  *error = direct ? 0 : errno;
  if (!direct && *error != EINVAL && *error != ENOTSUP) fail_errno("the file cannot be opened again for direct transfers");
  return direct;
}

Fd reopen_leased(int fd) {
  const std::string self = "/proc/self/fd/" + std::to_string(fd);
  Fd leased(open(self.c_str(), O_RDONLY | O_CLOEXEC));
  // The signal that announces an opener would be SIGIO, which ends a process; SIGURG is ignored by default.
  if (!leased || fcntl(leased.get(), F_SETSIG, SIGURG) || fcntl(leased.get(), F_SETLEASE, F_RDLCK)) return Fd();
  return leased;
}

void read_exact(int fd, void* to, uint64_t length, uint64_t offset) {
  iovec part{to, length};
  read_exact(fd, &part, 1, offset);
}

void read_exact(int fd, iovec* parts, int count, uint64_t offset) {
  for (uint64_t left = total(parts, count); left;) {
    const ssize_t done = preadv(fd, parts, count, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail_errno("reading " + place(offset, left));
    if (done == 0) fail(COLDSNAP_IO_SHORT, "the file ended while " + place(offset, left) + " were still to be read");
    offset += static_cast<uint64_t>(done);
    left -= static_cast<uint64_t>(done);
    advance(parts, count, static_cast<size_t>(done));
  }
}

void write_exact(int fd, const void* from, uint64_t length, uint64_t offset) {
  iovec part{const_cast<void*>(from), length};
  write_exact(fd, &part, 1, offset);
}

void write_exact(int fd, iovec* parts, int count, uint64_t offset) {
  for (uint64_t left = total(parts, count); left;) {
    const ssize_t done = pwritev(fd, parts, count, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail_errno("writing " + place(offset, left));
    // A short write is how a full disk announces itself: the next write names the reason, or makes progress.
    if (done == 0) fail(COLDSNAP_IO_SHORT, "the filesystem took none of " + place(offset, left));
    offset += static_cast<uint64_t>(done);
    left -= static_cast<uint64_t>(done);
    advance(parts, count, static_cast<size_t>(done));
  }
}

std::optional<uint64_t> resident_pages(int fd, uint64_t offset, uint64_t length) {
  if (!length) return 0;
  CachestatRange range{offset, length};
  Cachestat state{};
  if (syscall(kSysCachestat, fd, &range, &state, 0) == 0) return state.cached;
  // cachestat is Linux 6.5. Where the file is not ours the kernel refuses, and mincore would claim that all is resident.
  if (errno != ENOSYS) return std::nullopt;
  return resident_by_mincore(fd, offset, length);
}

bool on_memory_filesystem(int fd) {
  struct statfs status;
  return fstatfs(fd, &status) == 0 && (status.f_type == TMPFS_MAGIC || status.f_type == RAMFS_MAGIC);
}

Mapping::Mapping(int fd, uint64_t offset, uint64_t length) : offset_(offset), length_(length) {
  if (!length) return;
  void* mapped = mmap(nullptr, length, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) fail_errno("the file cannot be mapped");
  base_ = static_cast<uint8_t*>(mapped);
}

Mapping::Mapping(Mapping&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), offset_(other.offset_), length_(other.length_) {}

Mapping::~Mapping() {
  if (base_) munmap(base_, length_);
}

bool Mapping::populate(uint64_t offset, uint64_t length) const {
  const uint64_t start = round_down(offset);
  return madvise(at(start), offset + length - start, MADV_POPULATE_READ) == 0;
}

void Mapping::drop(uint64_t offset, uint64_t length) const {
  const uint64_t start = round_down(offset);
  madvise(at(start), offset + length - start, MADV_DONTNEED);
}

}  // namespace coldsnap
