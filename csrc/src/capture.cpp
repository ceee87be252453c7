#include "capture.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <optional>

#include "error.hpp"
#include "hydrate.hpp"
#include "turnstile.hpp"
#include "writing.hpp"

namespace coldsnap {
namespace {

constexpr uint64_t kSlice = 4 << 20;
constexpr uint64_t kGap = 64 << 10;
constexpr unsigned kLeastThreads = 8;  // enough requests for a disk when there are few processors
constexpr uint32_t kFlags = COLDSNAP_IO_FILE_SHA256 | COLDSNAP_IO_READ_BACK | COLDSNAP_IO_PAD_EXTENTS | COLDSNAP_IO_NO_DIRECT_OPEN;

uint64_t padded_end(const coldsnap_io_extent& extent, const coldsnap_io_options& options) {
  const uint64_t end = extent.file_offset + extent.length;
  return options.flags & COLDSNAP_IO_PAD_EXTENTS ? round_up(end) : end;
}

// Returns the size of the file.
uint64_t check_extents(std::span<const coldsnap_io_extent> extents, const coldsnap_io_options& options) {
  uint64_t end = 0;
  for (size_t i = 0; i < extents.size(); ++i) {
    const std::string where = "extent " + std::to_string(i);
    if (extents[i].file_offset < end) fail(COLDSNAP_IO_INVALID, where + " starts before the end of the one before it");
    if (extents[i].file_offset > INT64_MAX - extents[i].length - kPage) fail(COLDSNAP_IO_INVALID, where + " ends past any file");
    if (extents[i].verify > COLDSNAP_IO_VERIFY_CRC32_SHA256) fail(COLDSNAP_IO_INVALID, where + " asks for an unknown digest");
    end = padded_end(extents[i], options);
  }
  return end;
}

std::optional<size_t> first_unaligned(std::span<const coldsnap_io_extent> extents, const coldsnap_io_options& options) {
  for (size_t i = 0; i < extents.size(); ++i)
    if (extents[i].file_offset % kPage || padded_end(extents[i], options) % kPage) return i;
  return std::nullopt;
}

void reserve(int fd, uint64_t bytes) {
  if (ftruncate(fd, static_cast<off_t>(bytes))) fail_errno("the file cannot be given its size");
  // In memory, reserving would only zero pages that are about to be written.
  if (!bytes || on_memory_filesystem(fd)) return;
  if (fallocate(fd, 0, 0, static_cast<off_t>(bytes)) && errno != EINVAL && errno != EOPNOTSUPP && errno != ENOSYS)
    fail_errno("no room for " + std::to_string(bytes) + " bytes");
}

void make_durable(int fd, uint64_t& spent_ns) {
  const Stopwatch watch(spent_ns);
  if (fdatasync(fd)) fail_errno("the file cannot be made durable");
}

Fd direct_descriptor(int fd, std::span<const coldsnap_io_extent> extents, const coldsnap_io_options& options,
                     coldsnap_io_result& result) {
  result.reason = COLDSNAP_IO_REASON_REQUESTED;
  if (options.backend == COLDSNAP_IO_BUFFERED) return Fd();
  const auto unaligned = first_unaligned(extents, options);
  if (unaligned && options.backend == COLDSNAP_IO_DIRECT)
    fail(COLDSNAP_IO_INVALID, "extent " + std::to_string(*unaligned) + " is not aligned to 4096 bytes, as direct writing needs it");
  if (unaligned) {
    result.reason = COLDSNAP_IO_REASON_LAYOUT;
    return Fd();
  }
  const bool unwanted = on_memory_filesystem(fd) || (options.flags & COLDSNAP_IO_NO_DIRECT_OPEN);
  Fd direct;
  if (options.backend == COLDSNAP_IO_DIRECT || !unwanted) direct = reopen_direct(fd, O_WRONLY, &result.direct_errno);
  if (!direct && options.backend == COLDSNAP_IO_DIRECT) fail_refused_direct(result.direct_errno);
  if (!direct) result.reason = COLDSNAP_IO_REASON_NO_DIRECT;
  return direct;
}

// From the disk, where it can be: the pages just written are dropped first.
void read_back(int fd, std::span<const coldsnap_io_extent> found, coldsnap_io_options options, bool direct,
               coldsnap_io_result& result) {
  const Stopwatch watch(result.read_back_ns);
  posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  options.backend = direct ? COLDSNAP_IO_DIRECT : COLDSNAP_IO_BUFFERED;
  options.access = COLDSNAP_IO_ACCESS_READ;
  options.slice_bytes = 0;
  options.cuda_device = COLDSNAP_IO_HOST;
  options.flags = COLDSNAP_IO_DISCARD;
  coldsnap_io_result ignored{};
  hydrate(fd, found, options, ignored);
}

std::vector<coldsnap_io_extent> with_read_back_digests(std::span<const coldsnap_io_extent> extents, bool wanted) {
  std::vector<coldsnap_io_extent> copy(extents.begin(), extents.end());
  for (auto& extent : copy)
    if (wanted && extent.verify == COLDSNAP_IO_VERIFY_NONE) extent.verify = COLDSNAP_IO_VERIFY_CRC32;
  return copy;
}

void check(const coldsnap_io_options& options) {
  check_options(options);
  if (options.backend > COLDSNAP_IO_DIRECT || options.access != COLDSNAP_IO_ACCESS_AUTO || (options.flags & ~kFlags))
    fail(COLDSNAP_IO_INVALID, "captures are auto, buffered or direct, and have no access or discard");
}

Shape make_shape(const coldsnap_io_options& options, const Layout& layout, uint64_t slice) {
  const unsigned wanted = options.threads ? options.threads : std::max(usable_processors(), kLeastThreads);
  const uint64_t budget = std::max<uint64_t>(1, options.queue_depth * options.chunk_bytes / slice);
  return {static_cast<unsigned>(std::min<uint64_t>({wanted, budget, std::max<uint64_t>(1, layout.tasks.size())})), slice, 1};
}

}  // namespace

void capture(int fd, std::span<coldsnap_io_extent> extents, const coldsnap_io_options& options, coldsnap_io_result& result) {
  const uint64_t began = now_ns();
  check(options);
  result.file_bytes = check_extents(extents, options);
  const bool reads_back = options.flags & COLDSNAP_IO_READ_BACK;
  const auto wanted = with_read_back_digests(extents, reads_back);
  const uint64_t slice = std::min(options.slice_bytes ? options.slice_bytes : kSlice, options.chunk_bytes);
  const Layout layout = make_layout(wanted, {.slice_bytes = slice, .gap_bytes = kGap, .file_order = true});
  Digests digests(wanted, layout);
  const Shape shape = make_shape(options, layout, slice);

  if (file_size(fd)) fail(COLDSNAP_IO_INVALID, "the file is not empty: captures never overwrite");
  const Fd direct = direct_descriptor(fd, extents, options, result);
  reserve(fd, result.file_bytes);
  std::optional<Turnstile> whole;
  if (options.flags & COLDSNAP_IO_FILE_SHA256) whole.emplace();
  Writing writing{options, layout, digests, fd, direct.get(), whole ? &*whole : nullptr, {}};
  result.initialization_ns = now_ns() - began;

  write_all(writing, shape, result);
  if (whole) std::ranges::copy(whole->finish(result.file_bytes), result.file_sha256);
  make_durable(fd, result.durability_ns);
  const auto found = digests.found();
  if (reads_back) read_back(fd, found, options, static_cast<bool>(direct), result);
  for (size_t i = 0; i < extents.size(); ++i) {
    if (extents[i].verify != COLDSNAP_IO_VERIFY_NONE) ++result.verified_extents;
    const uint32_t verify = extents[i].verify;
    extents[i] = found[i];
    extents[i].verify = verify;
  }
  result.total_ns = now_ns() - began;
}

}  // namespace coldsnap
