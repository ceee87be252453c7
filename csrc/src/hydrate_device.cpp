#include <cstring>

#include "cuda.hpp"
#include "error.hpp"
#include "hydration.hpp"
#include "ring.hpp"

namespace coldsnap {
namespace {

// Pages of the file itself, page-locked for the device.
class RegisteredPages {
 public:
  RegisteredPages(int fd, const Slice& slice)
      : mapping_(fd, round_down(slice.start), round_up(slice.end) - round_down(slice.start)), base_(mapping_.at(round_down(slice.start))) {
    const uint64_t bytes = round_up(slice.end) - round_down(slice.start);
    mapping_.populate(slice.start, slice.end - slice.start);
    const unsigned flags = cuda::kRegisterPortable | cuda::kRegisterReadOnly;
    cuda::check(cuda::table().host_register(base_, bytes, flags), "page-locking pages of the file");
  }
  ~RegisteredPages() { cuda::table().host_unregister(base_); }
  RegisteredPages(const RegisteredPages&) = delete;
  RegisteredPages& operator=(const RegisteredPages&) = delete;
  const uint8_t* at(uint64_t offset) const { return mapping_.at(offset); }

 private:
  Mapping mapping_;
  uint8_t* base_;
};

struct Stage {
  uint8_t* data;
  cuda::Event copied;
  std::optional<RegisteredPages> pages;
};

// One thread: its own stages, its own stream. While the device copies from one stage, the next is read and the last summed.
class DeviceWorker {
 public:
  DeviceWorker(Hydration& hydration, const Shape& shape, uint8_t* memory)
      : hydration_(hydration), summing_(hydration.digests), registers_(hydration.options.access == COLDSNAP_IO_ACCESS_REGISTER) {
    stages_ = std::vector<Stage>(shape.stages);
    for (Stage& stage : stages_) {
      stage.data = memory;
      if (memory) memory += shape.slice_bytes;
    }
  }

  void slice(const Slice& slice) {
    Stage& stage = stages_[turn_++ % stages_.size()];
    {
      const Stopwatch watch(spent.wait);
      stage.copied.wait();
      stage.pages.reset();
    }
    const uint8_t* bytes = fill(stage, slice);
    const auto segments = hydration_.layout.of(slice);
    {
      const Stopwatch watch(spent.enqueue);
      for (const Segment& segment : segments)
        stream_.to_device(segment.address, bytes + (segment.file_offset - slice.start), segment.length);
      stage.copied.record(stream_);
    }
    const Stopwatch watch(spent.checksum);
    for (const Segment& segment : segments) summing_.take(segment, bytes + (segment.file_offset - slice.start));
  }

  void synchronize() {
    const Stopwatch watch(spent.synchronize);
    stream_.synchronize();
  }

  Spent spent;

 private:
  const uint8_t* fill(Stage& stage, const Slice& slice) {
    const auto parts = hydration_.source.route(slice, spent);
    const Stopwatch watch(spent.io);
    if (registers_) return stage.pages.emplace(hydration_.source.fd(), slice).at(slice.start);
    uint8_t* start = stage.data + slice.head;
    const Mapping* mapping = hydration_.source.mapping();
    const uint64_t length = slice.end - slice.start;
    const bool buffered = parts.size() == 1 && parts[0].backend == COLDSNAP_IO_BUFFERED;
    if (mapping && buffered && mapping->populate(slice.start, length)) {
      std::memcpy(start, mapping->at(slice.start), length);
      mapping->drop(slice.start, length);
    } else {
      hydration_.source.read(parts, start);
    }
    return start;
  }

  Hydration& hydration_;
  Summing summing_;
  bool registers_;
  std::vector<Stage> stages_;
  uint64_t turn_ = 0;
  cuda::Stream stream_;  // last: it waits for its copies before the stages go
};

}  // namespace

void hydrate_device(Hydration& hydration, const Shape& shape, Spent& spent) {
  const cuda::Session session(hydration.options.cuda_device);
  const bool registers = hydration.options.access == COLDSNAP_IO_ACCESS_REGISTER;
  Ring::Lease ring(registers ? 0 : shape.ring_bytes(), !registers);
  std::vector<Spent> parts(shape.threads);
  std::atomic<bool> device_lost = false;
  const auto work = [&](unsigned index) {
    const cuda::Current current(session.context());
    DeviceWorker worker(hydration, shape, registers ? nullptr : ring.data() + index * shape.stages * shape.slice_bytes);
    try {
      hydration.for_each_slice([&](const Slice& slice) { worker.slice(slice); });
    } catch (...) {
      hydration.failure.take(std::current_exception());
    }
    try {
      worker.synchronize();
    } catch (...) {
      device_lost = true;
      throw;
    }
    parts[index] = std::move(worker.spent);
  };
  try {
    run_workers(shape.threads, hydration.failure, work);
  } catch (...) {
    if (device_lost) ring.abandon();
    throw;
  }
  for (const Spent& part : parts) spent += part;
}

}  // namespace coldsnap
