// The file of a hydrate: which ranges are read how, and the reading.
#pragma once

#include <array>
#include <atomic>
#include <optional>
#include <span>
#include <vector>

#include "coldsnap_io.h"
#include "file.hpp"
#include "layout.hpp"

namespace coldsnap {

// Counters of one thread, added up when all have ended.
struct Spent {
  uint64_t io = 0, wait = 0, checksum = 0, enqueue = 0, synchronize = 0;
  uint64_t buffered = 0, direct = 0, edge = 0;
  std::vector<coldsnap_io_range> ranges;
  Spent& operator+=(const Spent& other);
};

// Reading against mapping: measured on the first slices, since it depends on the kernel, the filesystem and the size of
// its folios: a mapping of 4 KiB folios costs more than it saves, one of large folios saves a third. Only into host memory:
// into a stage that stays in the cache, reading is never the slower one. tmpfs has 4 KiB folios unless told otherwise.
class AccessChoice {
 public:
  // No trial: this one.
  void fix(coldsnap_io_access access) { fixed_ = access; }
  coldsnap_io_access next();
  void measured(coldsnap_io_access access, uint64_t bytes, uint64_t ns);
  coldsnap_io_access settled() const;

 private:
  static constexpr uint64_t kTrials = 2;
  struct Tally {
    std::atomic<uint64_t> started = 0, finished = 0, bytes = 0, ns = 0;
  };
  coldsnap_io_access fixed_ = COLDSNAP_IO_ACCESS_AUTO;
  std::array<Tally, 2> tallies_;  // read, map
};

class Source {
 public:
  // `to_host`: final addresses are in host memory.
  Source(int fd, const coldsnap_io_options& options, bool to_host);

  uint64_t size() const { return size_; }
  int fd() const { return fd_; }
  int direct_errno() const { return direct_errno_; }
  bool direct() const { return static_cast<bool>(direct_); }
  AccessChoice& access() { return access_; }
  const AccessChoice& access() const { return access_; }
  const Mapping* mapping() const { return mapping_ ? &*mapping_ : nullptr; }

  // How this slice is read; noted in `spent`. One buffered part, or any mixture.
  std::vector<coldsnap_io_range> route(const Slice& slice, Spent& spent) const;
  // Read the parts of a slice; `to` is where the slice's first byte goes. For direct parts it must be congruent to the
  // file offset modulo a page.
  void read(const std::vector<coldsnap_io_range>& parts, uint8_t* to) const;
  // Whether the disk is what these extents wait for: they go around the page cache, or it seems not to hold most of them (a
  // few places are asked).
  bool waits_for_disk(std::span<const coldsnap_io_extent> extents) const;

 private:
  void prepare_access(const coldsnap_io_options& options, bool to_host);
  void split_direct(uint64_t start, uint64_t end, uint32_t reason, std::vector<coldsnap_io_range>& parts) const;
  void split_by_residency(uint64_t start, uint64_t end, std::vector<coldsnap_io_range>& parts) const;

  int fd_;
  uint64_t size_;
  coldsnap_io_backend backend_;
  Fd direct_;
  int direct_errno_ = 0;
  Fd leased_;
  std::optional<Mapping> mapping_;
  AccessChoice access_;
};

// Sort by offset and join neighbours that went the same way for the same reason.
std::vector<coldsnap_io_range> joined(std::vector<coldsnap_io_range> ranges);

}  // namespace coldsnap
