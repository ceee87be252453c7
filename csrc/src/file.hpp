// Open files: positional reads and writes that are whole or an error, page-cache residency, mappings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

struct iovec;

namespace coldsnap {

constexpr uint64_t kPage = 4096;  // block of direct transfers, alignment of extents

constexpr uint64_t round_down(uint64_t value) { return value & ~(kPage - 1); }
constexpr uint64_t round_up(uint64_t value) { return round_down(value + kPage - 1); }

uint64_t now_ns();

// Adds its lifetime to a counter.
class Stopwatch {
 public:
  explicit Stopwatch(uint64_t& counter) : counter_(counter), start_(now_ns()) {}
  ~Stopwatch() { counter_ += now_ns() - start_; }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  uint64_t& counter_;
  uint64_t start_;
};

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

uint64_t file_size(int fd);

// A second description of the same open file, for direct transfers. No name is looked up again.
// Empty, with *error set, when the filesystem refuses (EINVAL, ENOTSUP); any other failure is thrown.
Fd reopen_direct(int fd, int access_mode, int* error);

void read_exact(int fd, void* to, uint64_t length, uint64_t offset);
void read_exact(int fd, iovec* parts, int count, uint64_t offset);  // parts are used up
void write_exact(int fd, const void* from, uint64_t length, uint64_t offset);
void write_exact(int fd, iovec* parts, int count, uint64_t offset);

// Pages of [offset, offset + length) that the page cache holds; nothing when the kernel does not say.
std::optional<uint64_t> resident_pages(int fd, uint64_t offset, uint64_t length);

bool on_memory_filesystem(int fd);

// A description of an open file that others cannot truncate: a read lease makes the kernel hold whoever opens the file for
// writing until this is closed (fcntl(2)). Without it a mapping could end in SIGBUS. Empty where the lease is refused: the file
// is not ours, or someone has it open for writing already.
Fd reopen_leased(int fd);

// A read-only mapping of a stretch of a file that starts on a page. Pages are populated before they are touched, so that an I/O error or a truncated
// file is a return value rather than a signal, and dropped afterwards, so that they do not count as this process's memory.
class Mapping {
 public:
  Mapping(int fd, uint64_t offset, uint64_t length);
  Mapping(Mapping&& other) noexcept;
  ~Mapping();
  Mapping& operator=(const Mapping&) = delete;
  uint8_t* at(uint64_t file_offset) const { return base_ + (file_offset - offset_); }
  bool populate(uint64_t offset, uint64_t length) const;
  void drop(uint64_t offset, uint64_t length) const;

 private:
  uint8_t* base_ = nullptr;
  uint64_t offset_;
  uint64_t length_;
};

}  // namespace coldsnap
