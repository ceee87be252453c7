#include "page_image.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "checksum.hpp"
#include "error.hpp"
#include "file.hpp"
#include "lz4.hpp"
#include "page_batches.hpp"
#include "scratch.hpp"

namespace coldsnap {
namespace {

constexpr uint64_t kSpare = 2;  // batches read ahead of the workers

void write_all(int fd, const uint8_t* from, uint64_t length) {
  while (length) {
    const ssize_t done = write(fd, from, length);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail_errno("writing pages");
    from += done;
    length -= static_cast<uint64_t>(done);
  }
}

struct Batch {
  uint64_t offset;  // of its payload in the file
  uint64_t length;
};

std::vector<Batch> lay_out(const Geometry& geometry, std::span<const coldsnap_io_block> blocks, uint64_t offset) {
  std::vector<Batch> batches;
  for (uint64_t batch = 0; batch < geometry.batches(); ++batch) {
    uint64_t length = 0;
    for (uint64_t block = geometry.first_block(batch); block < geometry.end_block(batch); ++block) {
      if (blocks[block].length > geometry.raw_length(block)) fail(COLDSNAP_IO_INVALID, "a block is longer than its pages");
      length += geometry.padded(blocks[block].length);
    }
    batches.push_back({offset, length});
    offset += length;
  }
  return batches;
}

[[noreturn]] void broken(uint64_t block, const char* what, std::string expected, std::string actual) {
  fail_mismatch(block, what, std::move(expected), std::move(actual));
}

void unpack_block(const uint8_t* payload, const coldsnap_io_block& block, uint64_t index, uint8_t* raw, uint64_t length,
                  const Geometry& geometry) {
  if (!block.length) {
    std::memset(raw, 0, length);
    return;
  }
  if (const uint32_t found = crc32(0, payload, block.length); found != block.crc32)
    broken(index, "block", hex(block.crc32), hex(found));
  const uint64_t padded = geometry.padded(block.length);
  if (std::any_of(payload + block.length, payload + padded, [](uint8_t byte) { return byte != 0; }))
    broken(index, "padding", "zeros", "other bytes");
  if (block.length == length)
    std::memcpy(raw, payload, length);
  else if (!lz4::decode(payload, block.length, raw, length))
    broken(index, "block", "LZ4 of " + std::to_string(length) + " bytes", "something else");
}

class Unpacking {
 public:
  Unpacking(int in, std::span<const coldsnap_io_block> blocks, int out, const coldsnap_io_image& image,
            coldsnap_io_image_result& result)
      : in_(in), out_(out), image_(image), geometry_(image), blocks_(blocks), result_(result) {
    if (blocks.size() != geometry_.blocks()) fail(COLDSNAP_IO_INVALID, "the index does not cover the image");
    batches_ = lay_out(geometry_, blocks, image.payload_offset);
    open_direct();
    readers_ = direct_ ? 2 : 1;
    for (uint64_t slot = 0; slot < image.workers + readers_ + kSpare; ++slot)
      payloads_.push_back({std::make_unique<Scratch>(geometry_.batch_bytes() + kPage + lz4::kSlack)});
    for (uint64_t slot = 0; slot < image.workers + kSpare; ++slot)
      pages_.push_back({std::make_unique<Scratch>(geometry_.batch_bytes() + lz4::kSlack)});
  }

  void run() {
    // Reading, decompressing and writing have threads of their own, so that none of them waits for another.
    run_together(image_.workers + readers_ + 1, meeting_, [this](unsigned index) {
      if (index < image_.workers) return work();
      if (index < image_.workers + readers_) return read();
      write();
    });
    result_.workers = image_.workers;
    result_.raw_bytes = image_.raw_bytes;
    for (const auto& block : blocks_) result_.payload_bytes += block.length;
    for (uint64_t block = 0; block < blocks_.size(); ++block)
      if (!blocks_[block].length) result_.zero_bytes += geometry_.raw_length(block);
    result_.end = batches_.empty() ? image_.payload_offset : batches_.back().offset + batches_.back().length;
  }

 private:
  void open_direct() {
    if (image_.backend == COLDSNAP_IO_BUFFERED) return;
    if (image_.backend > COLDSNAP_IO_DIRECT) fail(COLDSNAP_IO_INVALID, "an image is read with auto, buffered or direct");
    const bool chosen = image_.backend == COLDSNAP_IO_DIRECT;
    if (image_.alignment != kPage) {
      if (chosen) fail(COLDSNAP_IO_UNAVAILABLE, "a packed image cannot be read directly: its payloads are not aligned");
      return;
    }
    if (!chosen && on_memory_filesystem(in_)) return;
    int error = 0;
    direct_ = reopen_direct(in_, O_RDONLY, &error);
    if (!direct_ && chosen) fail_refused_direct(error);
  }

  // Memory for one batch after the other: batches take turns, so a slot is free when the batch that had it before is done.
  struct Slot {
    std::unique_ptr<Scratch> memory;
    uint64_t filled = 0, emptied = 0;  // the batch that is there, or was done there, plus 1
  };
  using Slots = std::vector<Slot>;

  static Slot& slot(Slots& slots, uint64_t batch) { return slots[batch % slots.size()]; }

  bool await_empty(Slots& slots, uint64_t batch) {
    return meeting_.when(
        [&] { return batch < slots.size() || slot(slots, batch).emptied == batch - slots.size() + 1; }, [] {});
  }
  bool await_filled(Slots& slots, uint64_t batch) {
    return meeting_.when([&] { return slot(slots, batch).filled == batch + 1; }, [] {});
  }
  bool change(const std::function<void()>& body) { return meeting_.when([] { return true; }, body); }

  void read() {
    uint64_t io_ns = 0, buffered = 0, direct = 0;
    for (;;) {
      uint64_t batch = 0;
      if (!change([&] { batch = next_read_++; }) || batch >= batches_.size()) break;
      if (!await_empty(payloads_, batch)) break;
      const auto [offset, length] = batches_[batch];
      if (length) {
        const Stopwatch watch(io_ns);
        const bool around = direct_ && (image_.backend == COLDSNAP_IO_DIRECT || !resident(offset, length));
        read_exact(around ? direct_.get() : in_, slot(payloads_, batch).memory->get(), length, offset);
        (around ? direct : buffered) += length;
      }
      if (!change([&] { slot(payloads_, batch).filled = batch + 1; })) break;
    }
    change([&] {
      result_.io_ns += io_ns;
      result_.buffered_bytes += buffered;
      result_.direct_bytes += direct;
    });
  }

  bool resident(uint64_t offset, uint64_t length) const {
    const auto pages = resident_pages(in_, offset, length);
    return pages && *pages * 2 >= (length + kPage - 1) / kPage;  // a few that are missing are read faster than all of it
  }

  void work() {
    uint64_t codec_ns = 0;
    for (;;) {
      uint64_t batch = 0;
      // In order: a batch that has to be written later must never keep an earlier one from its turn.
      if (!change([&] { batch = next_work_++; }) || batch >= batches_.size()) break;
      if (!await_filled(payloads_, batch) || !await_empty(pages_, batch)) break;
      {
        const Stopwatch watch(codec_ns);
        unpack(batch, slot(pages_, batch).memory->get());
      }
      if (!change([&] { slot(payloads_, batch).emptied = slot(pages_, batch).filled = batch + 1; })) break;
    }
    change([&] { result_.codec_ns += codec_ns; });
  }

  void write() {
    uint64_t write_ns = 0;
    for (uint64_t batch = 0; batch < batches_.size(); ++batch) {
      if (!await_filled(pages_, batch)) break;
      {
        const Stopwatch watch(write_ns);
        emit(batch, slot(pages_, batch).memory->get());
      }
      if (!change([&] { slot(pages_, batch).emptied = batch + 1; })) break;
    }
    change([&] { result_.write_ns += write_ns; });
  }

  void unpack(uint64_t batch, uint8_t* raw) {
    const uint8_t* payload = slot(payloads_, batch).memory->get();
    for (uint64_t block = geometry_.first_block(batch); block < geometry_.end_block(batch); ++block) {
      const uint64_t length = geometry_.raw_length(block);
      unpack_block(payload, blocks_[block], block, raw, length, geometry_);
      payload += geometry_.padded(blocks_[block].length);
      raw += length;
    }
  }

  void emit(uint64_t batch, const uint8_t* raw) {
    const uint64_t start = geometry_.raw_at(geometry_.first_block(batch));
    const uint64_t end = geometry_.raw_at(geometry_.end_block(batch));
    if (image_.flags & COLDSNAP_IO_SEQUENTIAL) return write_all(out_, raw, end - start);
    // Runs of blocks with content; between them the file keeps its holes.
    uint64_t from = start;
    for (uint64_t block = geometry_.first_block(batch); block < geometry_.end_block(batch); ++block) {
      if (blocks_[block].length) continue;
      const uint64_t hole = geometry_.raw_at(block);
      if (hole > from) write_exact(out_, raw + (from - start), hole - from, from);
      from = geometry_.raw_at(block + 1);
    }
    if (end > from) write_exact(out_, raw + (from - start), end - from, from);
  }

  int in_, out_;
  const coldsnap_io_image& image_;
  Geometry geometry_;
  std::span<const coldsnap_io_block> blocks_;
  coldsnap_io_image_result& result_;
  std::vector<Batch> batches_;
  Fd direct_;
  unsigned readers_ = 1;
  Slots payloads_, pages_;
  Meeting meeting_;
  uint64_t next_read_ = 0, next_work_ = 0;
};

}  // namespace

void unpack_pages(int in, std::span<const coldsnap_io_block> blocks, int out, const coldsnap_io_image& image,
                  coldsnap_io_image_result& result) {
  const uint64_t began = now_ns();
  Unpacking(in, blocks, out, image, result).run();
  result.total_ns = now_ns() - began;
}

}  // namespace coldsnap
