#include "source.hpp"

#include <fcntl.h>

#include <algorithm>

#include "error.hpp"

namespace coldsnap {
namespace {

constexpr uint64_t kResidencyBlock = 256 << 10;  // mixed slices are asked again in blocks of this size
constexpr uint64_t kResidencyProbes = 32;

void append(std::vector<coldsnap_io_range>& parts, uint64_t start, uint64_t end, uint32_t backend, uint32_t reason) {
  if (start == end) return;
  if (!parts.empty() && parts.back().backend == backend && parts.back().reason == reason &&
      parts.back().file_offset + parts.back().length == start)
    parts.back().length += end - start;
  else
    parts.push_back({start, end - start, backend, reason});
}

uint64_t pages(uint64_t start, uint64_t end) { return (round_up(end) - round_down(start)) / kPage; }

}  // namespace

Spent& Spent::operator+=(const Spent& other) {
  io += other.io;
  wait += other.wait;
  checksum += other.checksum;
  enqueue += other.enqueue;
  synchronize += other.synchronize;
  buffered += other.buffered;
  direct += other.direct;
  edge += other.edge;
  ranges.insert(ranges.end(), other.ranges.begin(), other.ranges.end());
  return *this;
}

coldsnap_io_access AccessChoice::next() {
  if (fixed_ != COLDSNAP_IO_ACCESS_AUTO) return fixed_;
  if (tallies_[0].started.load(std::memory_order_relaxed) < kTrials && tallies_[0].started.fetch_add(1) < kTrials)
    return COLDSNAP_IO_ACCESS_READ;
  if (tallies_[1].started.load(std::memory_order_relaxed) < kTrials && tallies_[1].started.fetch_add(1) < kTrials)
    return COLDSNAP_IO_ACCESS_MAP;
  return settled();
}

void AccessChoice::measured(coldsnap_io_access access, uint64_t bytes, uint64_t ns) {
  if (fixed_ != COLDSNAP_IO_ACCESS_AUTO) return;
  Tally& tally = tallies_[access == COLDSNAP_IO_ACCESS_MAP];
  if (tally.finished.load(std::memory_order_relaxed) >= kTrials) return;
  tally.bytes += bytes;
  tally.ns += ns;
  tally.finished++;
}

coldsnap_io_access AccessChoice::settled() const {
  if (fixed_ != COLDSNAP_IO_ACCESS_AUTO) return fixed_;
  const auto cost = [](const Tally& tally) {
    const uint64_t bytes = tally.bytes;
    return bytes ? static_cast<double>(tally.ns) / static_cast<double>(bytes) : 1e9;
  };
  // Neighbours make trials uncertain; where mapping loses, it loses by half.
  return cost(tallies_[1]) < 1.2 * cost(tallies_[0]) ? COLDSNAP_IO_ACCESS_MAP : COLDSNAP_IO_ACCESS_READ;
}

Source::Source(int fd, const coldsnap_io_options& options, bool to_host)
    : fd_(fd),
      size_(file_size(fd)),
      backend_(static_cast<coldsnap_io_backend>(options.backend)) {
  const bool memory = backend_ == COLDSNAP_IO_AUTO && on_memory_filesystem(fd);
  const bool wanted = backend_ == COLDSNAP_IO_DIRECT ||
                      (backend_ == COLDSNAP_IO_AUTO && !memory && !(options.flags & COLDSNAP_IO_NO_DIRECT_OPEN));
  if (wanted) direct_ = reopen_direct(fd, O_RDONLY, &direct_errno_);
  if (backend_ == COLDSNAP_IO_DIRECT && !direct_) fail_refused_direct(direct_errno_);
  prepare_access(options, to_host);
}

// Pages are touched only under a lease; `auto` reads where it cannot have one, what was asked for by name fails.
void Source::prepare_access(const coldsnap_io_options& options, bool to_host) {
  const bool named = options.access == COLDSNAP_IO_ACCESS_MAP || options.access == COLDSNAP_IO_ACCESS_REGISTER;
  const bool chosen = options.access == COLDSNAP_IO_ACCESS_AUTO && to_host && !on_memory_filesystem(fd_);
  if (!named && !chosen) return access_.fix(COLDSNAP_IO_ACCESS_READ);
  leased_ = reopen_leased(fd_);
  if (!leased_ && named) fail(COLDSNAP_IO_UNAVAILABLE, "no read lease on the file: it is open for writing, or not ours");
  if (!leased_) return access_.fix(COLDSNAP_IO_ACCESS_READ);
  if (named) access_.fix(static_cast<coldsnap_io_access>(options.access));
  if (options.access != COLDSNAP_IO_ACCESS_REGISTER) mapping_.emplace(leased_.get(), 0, size_);
}

void Source::split_direct(uint64_t start, uint64_t end, uint32_t reason, std::vector<coldsnap_io_range>& parts) const {
  // The interior in whole blocks, the edges through the page cache: a block at an edge belongs to someone else, too, and the
  // last block of a file is rarely whole.
  const uint64_t inner_start = std::min(round_up(start), end);
  const uint64_t inner_end = std::max(round_down(end), inner_start);
  append(parts, start, inner_start, COLDSNAP_IO_BUFFERED, COLDSNAP_IO_REASON_EDGE);
  append(parts, inner_start, inner_end, COLDSNAP_IO_DIRECT, reason);
  append(parts, inner_end, end, COLDSNAP_IO_BUFFERED, COLDSNAP_IO_REASON_EDGE);
}

void Source::split_by_residency(uint64_t start, uint64_t end, std::vector<coldsnap_io_range>& parts) const {
  for (uint64_t at = start; at < end;) {
    const uint64_t next = std::min(end, (at / kResidencyBlock + 1) * kResidencyBlock);
    const auto held = resident_pages(fd_, at, next - at);
    if (held && *held == pages(at, next))
      append(parts, at, next, COLDSNAP_IO_BUFFERED, COLDSNAP_IO_REASON_RESIDENT);
    else
      split_direct(at, next, COLDSNAP_IO_REASON_NOT_RESIDENT, parts);
    at = next;
  }
}

std::vector<coldsnap_io_range> Source::route(const Slice& slice, Spent& spent) const {
  std::vector<coldsnap_io_range> parts;
  if (!direct_) {
    const auto reason = backend_ == COLDSNAP_IO_AUTO ? COLDSNAP_IO_REASON_NO_DIRECT : COLDSNAP_IO_REASON_REQUESTED;
    append(parts, slice.start, slice.end, COLDSNAP_IO_BUFFERED, reason);
  } else if (backend_ == COLDSNAP_IO_DIRECT) {
    split_direct(slice.start, slice.end, COLDSNAP_IO_REASON_REQUESTED, parts);
  } else {
    const auto held = resident_pages(fd_, slice.start, slice.end - slice.start);
    if (!held || *held == 0)
      split_direct(slice.start, slice.end, held ? COLDSNAP_IO_REASON_NOT_RESIDENT : COLDSNAP_IO_REASON_UNKNOWN, parts);
    else if (*held == pages(slice.start, slice.end))
      append(parts, slice.start, slice.end, COLDSNAP_IO_BUFFERED, COLDSNAP_IO_REASON_RESIDENT);
    else
      split_by_residency(slice.start, slice.end, parts);
  }
  for (const auto& part : parts) {
    (part.backend == COLDSNAP_IO_DIRECT ? spent.direct : spent.buffered) += part.length;
    if (part.reason == COLDSNAP_IO_REASON_EDGE) spent.edge += part.length;
  }
  spent.ranges.insert(spent.ranges.end(), parts.begin(), parts.end());
  return parts;
}

void Source::read(const std::vector<coldsnap_io_range>& parts, uint8_t* to) const {
  for (const auto& part : parts) {
    const int fd = part.backend == COLDSNAP_IO_DIRECT ? direct_.get() : fd_;
    read_exact(fd, to, part.length, part.file_offset);
    to += part.length;
  }
}

bool Source::waits_for_disk(std::span<const coldsnap_io_extent> extents) const {
  if (backend_ == COLDSNAP_IO_DIRECT || backend_ == COLDSNAP_IO_GDS) return true;
  if (!direct_) return false;
  const size_t step = std::max<size_t>(1, extents.size() / kResidencyProbes);
  const uint64_t probes = std::max<uint64_t>(1, kResidencyProbes / std::max<size_t>(1, extents.size()));
  uint64_t asked = 0, held = 0;
  for (size_t i = 0; i < extents.size(); i += step) {
    for (uint64_t probe = 0; probe < probes && extents[i].length; ++probe, ++asked)
      held += resident_pages(fd_, extents[i].file_offset + extents[i].length / probes * probe, 1).value_or(0);
  }
  return 2 * held < asked;
}

std::vector<coldsnap_io_range> joined(std::vector<coldsnap_io_range> ranges) {
  std::ranges::stable_sort(ranges, {}, &coldsnap_io_range::file_offset);
  std::vector<coldsnap_io_range> result;
  for (const auto& range : ranges) append(result, range.file_offset, range.file_offset + range.length, range.backend, range.reason);
  return result;
}

}  // namespace coldsnap
