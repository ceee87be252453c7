#include <sys/uio.h>

#include <array>

#include "error.hpp"
#include "hydration.hpp"
#include "scratch.hpp"

namespace coldsnap {
namespace {

class HostWorker {
 public:
  HostWorker(Hydration& hydration, uint64_t slice_bytes)
      : hydration_(hydration),
        source_(hydration.source),
        summing_(hydration.digests),
        scratch_(slice_bytes),
        discard_(hydration.options.flags & COLDSNAP_IO_DISCARD) {}

  void slice(const Slice& slice) {
    const auto parts = source_.route(slice, spent);
    const bool buffered = parts.size() == 1 && parts[0].backend == COLDSNAP_IO_BUFFERED;
    if (buffered) {
      const coldsnap_io_access access = source_.access().next();
      const uint64_t began = now_ns();
      const bool mapped = access == COLDSNAP_IO_ACCESS_MAP && from_mapping(slice);
      if (!mapped) discard_ ? through_scratch(slice, parts) : scatter(slice);
      source_.access().measured(access, slice.end - slice.start, now_ns() - began);
    } else if (const Segment& only = hydration_.layout.of(slice)[0];
               !discard_ && slice.segment_count == 1 && (only.address - only.file_offset) % kPage == 0) {
      read(parts, reinterpret_cast<uint8_t*>(only.address));
      sum(only, reinterpret_cast<const uint8_t*>(only.address));
    } else {
      through_scratch(slice, parts);
    }
  }

  Spent spent;

 private:
  void read(const std::vector<coldsnap_io_range>& parts, uint8_t* to) {
    const Stopwatch watch(spent.io);
    source_.read(parts, to);
  }

  void sum(const Segment& segment, const uint8_t* bytes) {
    const Stopwatch watch(spent.checksum);
    summing_.take(segment, bytes);
  }

  void deliver(const Segment& segment, const uint8_t* bytes) {
    if (discard_) return sum(segment, bytes);
    const Stopwatch watch(spent.enqueue);
    summing_.copy_and_take(segment, bytes);
  }

  void through_scratch(const Slice& slice, const std::vector<coldsnap_io_range>& parts) {
    uint8_t* stage = scratch_.get() + slice.head;
    read(parts, stage);
    for (const Segment& segment : hydration_.layout.of(slice)) deliver(segment, stage + (segment.file_offset - slice.start));
  }

  // False when the pages cannot be had this way; reading then names the reason.
  bool from_mapping(const Slice& slice) {
    const Mapping& mapping = *source_.mapping();
    {
      const Stopwatch watch(spent.io);
      if (!mapping.populate(slice.start, slice.end - slice.start)) return false;
    }
    for (const Segment& segment : hydration_.layout.of(slice)) deliver(segment, mapping.at(segment.file_offset));
    mapping.drop(slice.start, slice.end - slice.start);
    return true;
  }

  // Straight to the final addresses; the gaps between segments go to the scratch buffer.
  void scatter(const Slice& slice) {
    std::array<iovec, 1024> parts;
    int count = 0;
    uint64_t at = slice.start;
    const auto segments = hydration_.layout.of(slice);
    for (const Segment& segment : segments) {
      // Extents that share bytes of the file cannot share one read.
      if (segment.file_offset < at) return through_scratch(slice, {{slice.start, slice.end - slice.start, COLDSNAP_IO_BUFFERED, 0}});
      if (segment.file_offset > at) parts[count++] = {scratch_.get(), segment.file_offset - at};
      parts[count++] = {reinterpret_cast<void*>(segment.address), segment.length};
      at = segment.file_offset + segment.length;
    }
    {
      const Stopwatch watch(spent.io);
      read_exact(source_.fd(), parts.data(), count, slice.start);
    }
    for (const Segment& segment : segments) sum(segment, reinterpret_cast<const uint8_t*>(segment.address));
  }

  Hydration& hydration_;
  Source& source_;
  Summing summing_;
  Scratch scratch_;
  bool discard_;
};

}  // namespace

void hydrate_host(Hydration& hydration, unsigned threads, uint64_t slice_bytes, Spent& spent) {
  std::vector<Spent> parts(threads);
  run_workers(threads, hydration.failure, [&](unsigned index) {
    HostWorker worker(hydration, slice_bytes);
    hydration.for_each_slice([&](const Slice& slice) { worker.slice(slice); });
    parts[index] = std::move(worker.spent);
  });
  for (const Spent& part : parts) spent += part;
}

}  // namespace coldsnap
