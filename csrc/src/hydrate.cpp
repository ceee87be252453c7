#include "hydrate.hpp"

#include <algorithm>

#include "error.hpp"
#include "hydration.hpp"

namespace coldsnap {
namespace {

// A slice and its successors should stay in the caches between the copy into the ring and the device's read of it. On an
// H200 with 16 processors 2 MiB was best or second to best on tmpfs and on a hot page cache (docs/transfer.md).
constexpr uint64_t kReadSlice = 2 << 20;
constexpr uint64_t kHostWindow = 32 << 20;  // mapped at a time by all threads together: counts as this process's memory
constexpr uint64_t kRegisterSlice = 32 << 20;
constexpr uint64_t kGap = 64 << 10;
constexpr unsigned kStages = 3;  // one being read into, one being copied from, one ready
constexpr unsigned kDirectThreads = 16;  // enough requests for a disk when there are few processors
constexpr unsigned kMostThreads = 64;

void check_extents(std::span<const coldsnap_io_extent> extents, uint64_t size) {
  for (size_t i = 0; i < extents.size(); ++i) {
    const auto& extent = extents[i];
    const uint64_t end = extent.file_offset + extent.length;
    const std::string where = "extent " + std::to_string(i);
    if (end < extent.file_offset || extent.address + extent.length < extent.address)
      fail(COLDSNAP_IO_INVALID, where + " wraps around the end of its address space");
    if (end > size)
      fail(COLDSNAP_IO_SHORT, where + " ends at byte " + std::to_string(end) + " of a file of " + std::to_string(size) + " bytes");
    if (extent.verify > COLDSNAP_IO_VERIFY_CRC32_SHA256) fail(COLDSNAP_IO_INVALID, where + " asks for an unknown digest");
  }
}

uint64_t slice_bytes(const coldsnap_io_options& options, bool host, bool disk) {
  uint64_t chosen = kReadSlice;
  if (options.access == COLDSNAP_IO_ACCESS_REGISTER) chosen = kRegisterSlice;
  // Out of the page cache into host memory there is no stage, and every unmapping interrupts all processors: the fewer the
  // better. A disk is asked in small pieces: large ones keep it waiting between two of a thread.
  if (host && !disk) chosen = round_down(kHostWindow / (options.threads ? options.threads : usable_processors()));
  return std::min(options.slice_bytes ? options.slice_bytes : std::max(chosen, kReadSlice), options.chunk_bytes);
}

unsigned wanted_threads(const coldsnap_io_options& options, bool disk) {
  if (options.threads) return options.threads;
  const unsigned processors = std::min(usable_processors(), kMostThreads);
  return disk ? std::max(processors, kDirectThreads) : processors;
}

Shape make_shape(const coldsnap_io_options& options, uint64_t slice, unsigned threads, uint64_t slices) {
  const uint64_t budget = std::max<uint64_t>(1, options.queue_depth * options.chunk_bytes / slice);
  threads = static_cast<unsigned>(std::min<uint64_t>({threads, budget, std::max<uint64_t>(1, slices)}));
  return {threads, slice, static_cast<unsigned>(std::clamp<uint64_t>(budget / threads, 1, kStages))};
}

void report(const Hydration& hydration, Spent& spent, coldsnap_io_result& result) {
  result.bytes = hydration.layout.bytes;
  result.slices = hydration.layout.slices.size();
  result.buffered_bytes = spent.buffered;
  result.direct_bytes = spent.direct;
  result.edge_bytes = spent.edge;
  result.file_bytes = hydration.source.size();
  result.access = hydration.source.access().settled();
  result.direct_errno = hydration.source.direct_errno();
  result.io_ns = spent.io;
  result.wait_ns = spent.wait;
  result.checksum_ns = spent.checksum;
  result.enqueue_ns = spent.enqueue;
  result.synchronize_ns = spent.synchronize;
}

}  // namespace

uint64_t Shape::ring_bytes() const { return slice_bytes * stages * threads; }

void check_options(const coldsnap_io_options& options) {
  if (options.abi != COLDSNAP_IO_ABI)
    fail(COLDSNAP_IO_INVALID, "the options have interface version " + std::to_string(options.abi) + ", this library has " +
                                  std::to_string(COLDSNAP_IO_ABI));
  if (options.queue_depth < 1 || options.queue_depth > 64) fail(COLDSNAP_IO_INVALID, "queue_depth is not 1 to 64");
  if (!options.chunk_bytes || options.chunk_bytes % kPage || options.slice_bytes % kPage)
    fail(COLDSNAP_IO_INVALID, "chunk_bytes and slice_bytes are not multiples of 4096");
  if (options.backend > COLDSNAP_IO_GDS || options.access > COLDSNAP_IO_ACCESS_REGISTER || options.reserved)
    fail(COLDSNAP_IO_INVALID, "the options have an unknown backend, access or reserved value");
  const bool host = options.cuda_device == COLDSNAP_IO_HOST;
  if (options.access == COLDSNAP_IO_ACCESS_REGISTER && (host || options.backend != COLDSNAP_IO_BUFFERED))
    fail(COLDSNAP_IO_INVALID, "access by registration is for buffered transfers to a device");
  if (options.backend == COLDSNAP_IO_GDS && host) fail(COLDSNAP_IO_INVALID, "gds is for transfers to a device");
}

std::vector<coldsnap_io_range> hydrate(int fd, std::span<const coldsnap_io_extent> extents, const coldsnap_io_options& options,
                                       coldsnap_io_result& result) {
  const uint64_t began = now_ns();
  check_options(options);
  const bool host = options.cuda_device == COLDSNAP_IO_HOST || (options.flags & COLDSNAP_IO_DISCARD);
  Source source(fd, options, host);
  check_extents(extents, source.size());
  const bool disk = source.waits_for_disk(extents);
  const uint64_t slice = slice_bytes(options, host, disk);
  const Layout layout = make_layout(extents, {.slice_bytes = slice, .gap_bytes = kGap});
  Digests digests(extents, layout);
  Hydration hydration{options, layout, source, digests, {}};
  const Shape shape = make_shape(options, slice, wanted_threads(options, disk), layout.tasks.size());
  result.initialization_ns = now_ns() - began;

  Spent spent;
  if (options.backend == COLDSNAP_IO_GDS)
    hydrate_gds(hydration, shape.threads, spent);
  else if (host)
    hydrate_host(hydration, shape.threads, slice, spent);
  else
    hydrate_device(hydration, shape, spent);
  result.verified_extents = digests.verify();

  report(hydration, spent, result);
  result.threads = shape.threads;
  result.slice_bytes = slice;
  result.ring_bytes = host || options.backend == COLDSNAP_IO_GDS ? 0 : shape.ring_bytes();
  auto ranges = joined(std::move(spent.ranges));
  result.range_count = ranges.size();
  result.total_ns = now_ns() - began;
  return ranges;
}

}  // namespace coldsnap
