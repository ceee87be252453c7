#include "writing.hpp"

#include <sys/uio.h>

#include <array>
#include <cstring>

#include "cuda.hpp"
#include "ring.hpp"
#include "scratch.hpp"

namespace coldsnap {
namespace {

const std::array<uint8_t, 65536> kZeros{};  // as long as the longest gap inside a slice

class Writer {
 public:
  Writer(Writing& writing, uint8_t* stage, uint64_t stage_bytes)
      : writing_(writing), summing_(writing.digests), stage_(stage), scratch_(stage_bytes) {}

  void work() {
    while (!writing_.failure.stop()) {
      const uint64_t index = writing_.next_task.fetch_add(1, std::memory_order_relaxed);
      if (index >= writing_.layout.tasks.size()) return;
      const Task& task = writing_.layout.tasks[index];
      for (uint64_t i = 0; i < task.slice_count && !writing_.failure.stop(); ++i) slice(task.first_slice + i);
    }
  }

  Spent spent;

 private:
  bool direct() const { return writing_.direct_fd >= 0; }
  bool from_device() const { return writing_.options.cuda_device != COLDSNAP_IO_HOST; }

  void slice(uint64_t index) {
    const Slice& slice = writing_.layout.slices[index];
    if (!from_device() && !direct()) return gather(index, slice);
    uint8_t* stage = from_device() ? fetch(slice) : collect(slice);
    sum(index, slice, [&](const Segment& segment) { return stage + (segment.file_offset - slice.start); });
    const Stopwatch watch(spent.io);
    const uint64_t length = slice.end - slice.start;
    // An aligned layout has aligned slices; the last block of a padded extent is zeros in the stage, too.
    if (direct())
      write_exact(writing_.direct_fd, stage, round_up(length), slice.start);
    else
      write_exact(writing_.fd, stage, length, slice.start);
    (direct() ? spent.direct : spent.buffered) += length;
  }

  // From host memory straight into the page cache.
  void gather(uint64_t index, const Slice& slice) {
    const auto address = [](const Segment& segment) { return reinterpret_cast<uint8_t*>(segment.address); };
    sum(index, slice, address);
    std::array<iovec, 1024> parts;
    int count = 0;
    uint64_t at = slice.start;
    for (const Segment& segment : writing_.layout.of(slice)) {
      if (segment.file_offset > at) parts[count++] = {const_cast<uint8_t*>(kZeros.data()), segment.file_offset - at};
      parts[count++] = {address(segment), segment.length};
      at = segment.file_offset + segment.length;
    }
    const Stopwatch watch(spent.io);
    write_exact(writing_.fd, parts.data(), count, slice.start);
    spent.buffered += slice.end - slice.start;
  }

  uint8_t* fetch(const Slice& slice) {
    uint8_t* stage = stage_ + slice.head;
    {
      const Stopwatch watch(spent.enqueue);
      for (const Segment& segment : writing_.layout.of(slice))
        stream_->to_host(stage + (segment.file_offset - slice.start), segment.address, segment.length);
      copied_->record(*stream_);
      zero_gaps(slice, stage);
    }
    const Stopwatch watch(spent.wait);
    copied_->wait();
    return stage;
  }

  uint8_t* collect(const Slice& slice) {
    const Stopwatch watch(spent.enqueue);
    uint8_t* stage = scratch_.get() + slice.head;
    for (const Segment& segment : writing_.layout.of(slice))
      std::memcpy(stage + (segment.file_offset - slice.start), reinterpret_cast<void*>(segment.address), segment.length);
    zero_gaps(slice, stage);
    return stage;
  }

  void zero_gaps(const Slice& slice, uint8_t* stage) const {
    uint64_t at = slice.start;
    for (const Segment& segment : writing_.layout.of(slice)) {
      std::memset(stage + (at - slice.start), 0, segment.file_offset - at);
      at = segment.file_offset + segment.length;
    }
    if (direct()) std::memset(stage + (at - slice.start), 0, round_up(at) - at);
  }

  template <typename BytesOf>
  void sum(uint64_t index, const Slice& slice, BytesOf&& bytes_of) {
    const Stopwatch watch(spent.checksum);
    const auto segments = writing_.layout.of(slice);
    for (const Segment& segment : segments) summing_.take(segment, bytes_of(segment));
    if (!writing_.whole) return;
    writing_.whole->pass(index, slice, [&](Sha256& whole) {
      uint64_t at = slice.start;
      for (const Segment& segment : segments) {
        whole.update_zeros(segment.file_offset - at);
        whole.update(bytes_of(segment), segment.length);
        at = segment.file_offset + segment.length;
      }
    });
  }

 public:
  // Needs the device's context: made on the worker's thread.
  void open_stream() {
    copied_.emplace();
    stream_.emplace();
  }
  void drain() {
    if (stream_) stream_->synchronize();
  }

 private:
  Writing& writing_;
  Summing summing_;
  uint8_t* stage_;
  Scratch scratch_;
  std::optional<cuda::Event> copied_;
  std::optional<cuda::Stream> stream_;  // last: it waits for its copies before the event goes
};

void write_from_host(Writing& writing, const Shape& shape, std::vector<Spent>& parts) {
  run_workers(shape.threads, writing.failure, [&](unsigned index) {
    Writer writer(writing, nullptr, shape.slice_bytes);
    try {
      writer.work();
    } catch (...) {
      if (writing.whole) writing.whole->give_up();
      throw;
    }
    parts[index] = std::move(writer.spent);
  });
}

void write_from_device(Writing& writing, const Shape& shape, std::vector<Spent>& parts) {
  const cuda::Session session(writing.options.cuda_device);
  Ring::Lease ring(shape.ring_bytes(), true);
  std::atomic<bool> device_lost = false;
  const auto work = [&](unsigned index) {
    const cuda::Current current(session.context());
    Writer writer(writing, ring.data() + index * shape.slice_bytes, shape.slice_bytes);
    try {
      writer.open_stream();
      writer.work();
    } catch (...) {
      writing.failure.take(std::current_exception());
      if (writing.whole) writing.whole->give_up();
    }
    try {
      writer.drain();
    } catch (...) {
      device_lost = true;
      throw;
    }
    parts[index] = std::move(writer.spent);
  };
  try {
    run_workers(shape.threads, writing.failure, work);
  } catch (...) {
    if (device_lost) ring.abandon();
    throw;
  }
}

}  // namespace

void write_all(Writing& writing, const Shape& shape, coldsnap_io_result& result) {
  std::vector<Spent> parts(shape.threads);
  const bool host = writing.options.cuda_device == COLDSNAP_IO_HOST;
  host ? write_from_host(writing, shape, parts) : write_from_device(writing, shape, parts);
  Spent spent;
  for (const Spent& part : parts) spent += part;
  result.bytes = writing.layout.bytes;
  result.slices = writing.layout.slices.size();
  result.buffered_bytes = spent.buffered;
  result.direct_bytes = spent.direct;
  result.threads = shape.threads;
  result.slice_bytes = shape.slice_bytes;
  result.ring_bytes = host ? 0 : shape.ring_bytes();
  result.io_ns = spent.io;
  result.wait_ns = spent.wait;
  result.checksum_ns = spent.checksum;
  result.enqueue_ns = spent.enqueue;
}

}  // namespace coldsnap
