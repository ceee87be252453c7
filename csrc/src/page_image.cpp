#include "page_image.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "checksum.hpp"
#include "error.hpp"
#include "file.hpp"
#include "lz4.hpp"
#include "scratch.hpp"
#include "workers.hpp"

namespace coldsnap {

namespace {

constexpr uint64_t kBatch = uint64_t{4} << 20;  // raw bytes that one thread takes at once
constexpr uint64_t kSpare = 2;                  // batches read ahead of the workers
constexpr unsigned kMaxWorkers = 256;

bool all_zero(const uint8_t* data, uint64_t length) {
  // Compared with itself, one word further: memcmp is the fastest loop there is. Most pages differ in their first words.
  uint64_t first;
  std::memcpy(&first, data, sizeof first);
  return first == 0 && std::memcmp(data, data + sizeof first, length - sizeof first) == 0;
}

class Geometry {
 public:
  explicit Geometry(const coldsnap_io_image& image) : image_(image) {
    if (image.abi != COLDSNAP_IO_ABI) fail(COLDSNAP_IO_INVALID, "options of another interface version");
    if (!image.block_bytes || image.block_bytes % kPage || image.block_bytes > lz4::kMaxBlock)
      fail(COLDSNAP_IO_INVALID, "a block has a multiple of 4096 bytes, at most 4 MiB");
    if (image.alignment != 1 && image.alignment != kPage) fail(COLDSNAP_IO_INVALID, "payloads are aligned to 1 or to 4096 bytes");
    if (image.payload_offset % kPage) fail(COLDSNAP_IO_INVALID, "payloads start at a multiple of 4096");
    if (image.raw_bytes % kPage) fail(COLDSNAP_IO_INVALID, "an image has whole pages");
    if (!image.workers || image.workers > kMaxWorkers || !image.acceleration || image.acceleration > 65537 || image.reserved)
      fail(COLDSNAP_IO_INVALID, "workers, acceleration or reserved out of range");
  }

  uint64_t blocks() const { return (image_.raw_bytes + image_.block_bytes - 1) / image_.block_bytes; }
  uint64_t blocks_in_batch() const { return std::max<uint64_t>(1, kBatch / image_.block_bytes); }
  uint64_t batches() const { return (blocks() + blocks_in_batch() - 1) / blocks_in_batch(); }
  uint64_t batch_bytes() const { return blocks_in_batch() * image_.block_bytes; }
  uint64_t first_block(uint64_t batch) const { return batch * blocks_in_batch(); }
  uint64_t end_block(uint64_t batch) const { return std::min(blocks(), first_block(batch + 1)); }
  uint64_t raw_at(uint64_t block) const { return std::min(image_.raw_bytes, block * image_.block_bytes); }
  uint64_t raw_length(uint64_t block) const { return raw_at(block + 1) - raw_at(block); }
  uint64_t padded(uint64_t length) const { return (length + image_.alignment - 1) / image_.alignment * image_.alignment; }

 private:
  const coldsnap_io_image& image_;
};

// Threads that wait for one another, and leave when one of them has failed.
class Meeting {
 public:
  // Waits until `ready()`, then runs `body()`, both under the lock. False, without running it, when somebody gave up.
  template <typename Ready, typename Body>
  bool when(Ready&& ready, Body&& body) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return given_up_ || ready(); });
    if (given_up_) return false;
    body();
    changed_.notify_all();
    return true;
  }

  void give_up() {
    const std::lock_guard lock(mutex_);
    given_up_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool given_up_ = false;
};

void run_together(unsigned count, Meeting& meeting, const std::function<void(unsigned)>& body) {
  FirstFailure failure;
  run_workers(count, failure, [&](unsigned index) {
    try {
      if (failure.stop()) meeting.give_up();  // a thread could not be started: the others must not wait for it
      body(index);
    } catch (...) {
      failure.take(std::current_exception());  // first of all: the others only leave because of it
      meeting.give_up();
      throw;
    }
    if (failure.stop()) meeting.give_up();
  });
}

void write_all(int fd, const uint8_t* from, uint64_t length) {
  while (length) {
    const ssize_t done = write(fd, from, length);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail_errno("writing pages");
    from += done;
    length -= static_cast<uint64_t>(done);
  }
}

// The stretches of a file that make up an image, one after the other.
class Gather {
 public:
  Gather(int fd, std::span<const coldsnap_io_span> spans, uint64_t expected) : fd_(fd), spans_(spans) {
    uint64_t total = 0;
    for (const auto& span : spans) {
      starts_.push_back(total);
      total += span.length;
    }
    if (total != expected) fail(COLDSNAP_IO_INVALID, "the spans do not add up to the image");
  }

  void read(uint8_t* to, uint64_t at, uint64_t length) const {
    auto index = static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), at) - starts_.begin()) - 1;
    while (length) {
      const auto& span = spans_[index];
      const uint64_t skip = at - starts_[index];
      const uint64_t part = std::min(length, span.length - skip);
      if (part) read_exact(fd_, to, part, span.offset + skip);
      to += part, at += part, length -= part;
      ++index;
    }
  }

 private:
  int fd_;
  std::span<const coldsnap_io_span> spans_;
  std::vector<uint64_t> starts_;
};

// One block into `to`, which has room for the block; the padding is written too. Returns what it takes with padding.
uint64_t pack_block(const uint8_t* raw, uint64_t length, uint8_t* to, const Geometry& geometry, uint32_t acceleration,
                    lz4::Table& table, coldsnap_io_block& block) {
  block = {};
  if (all_zero(raw, length)) return 0;
  // What saves nothing on the disk is stored: it would only cost time to read.
  const uint64_t most = geometry.padded(length) - geometry.padded(1);
  uint64_t stored = most ? lz4::encode(raw, length, to, most, acceleration, table) : 0;
  if (!stored) std::memcpy(to, raw, stored = length);
  const uint64_t padded = geometry.padded(stored);
  std::memset(to + stored, 0, padded - stored);
  block = {static_cast<uint32_t>(stored), crc32(0, to, stored)};
  return padded;
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

void find_zero_pages(int fd, std::span<uint8_t> zero) {
  Scratch window(kBatch);
  const uint64_t pages = kBatch / kPage;
  for (uint64_t page = 0; page < zero.size(); page += pages) {
    const uint64_t count = std::min<uint64_t>(pages, zero.size() - page);
    read_exact(fd, window.get(), count * kPage, page * kPage);
    for (uint64_t i = 0; i < count; ++i) zero[page + i] = all_zero(window.get() + i * kPage, kPage);
  }
}

void pack_pages(int in, std::span<const coldsnap_io_span> spans, int out, const coldsnap_io_image& image,
                std::span<coldsnap_io_block> blocks, coldsnap_io_image_result& result) {
  const uint64_t began = now_ns();
  const Geometry geometry(image);
  if (blocks.size() != geometry.blocks()) fail(COLDSNAP_IO_INVALID, "the index does not cover the image");
  const Gather gather(in, spans, image.raw_bytes);
  Meeting meeting;
  uint64_t next = 0, placed = 0, end = image.payload_offset;
  run_together(image.workers, meeting, [&](unsigned) {
    Scratch raw(geometry.batch_bytes()), packed(geometry.batch_bytes());
    const auto table = std::make_unique<lz4::Table>();
    uint64_t io_ns = 0, codec_ns = 0, write_ns = 0, payload = 0, zeros = 0;
    for (;;) {
      uint64_t batch = 0, length = 0, offset = 0;
      if (!meeting.when([] { return true; }, [&] { batch = next++; }) || batch >= geometry.batches()) break;
      const uint64_t first = geometry.first_block(batch), last = geometry.end_block(batch);
      {
        const Stopwatch watch(io_ns);
        gather.read(raw.get(), geometry.raw_at(first), geometry.raw_at(last) - geometry.raw_at(first));
      }
      {
        const Stopwatch watch(codec_ns);
        for (uint64_t block = first; block < last; ++block) {
          const uint64_t bytes = geometry.raw_length(block);
          length += pack_block(raw.get() + (geometry.raw_at(block) - geometry.raw_at(first)), bytes, packed.get() + length,
                               geometry, image.acceleration, *table, blocks[block]);
          payload += blocks[block].length;
          if (!blocks[block].length) zeros += bytes;
        }
      }
      const bool mine = meeting.when([&] { return placed == batch; }, [&] {
        offset = end;
        end += length;
        placed = batch + 1;
      });
      if (!mine) break;
      const Stopwatch watch(write_ns);
      if (length) write_exact(out, packed.get(), length, offset);
    }
    meeting.when([] { return true; }, [&] {
      result.io_ns += io_ns;
      result.codec_ns += codec_ns;
      result.write_ns += write_ns;
      result.payload_bytes += payload;
      result.zero_bytes += zeros;
    });
  });
  result.workers = image.workers;
  result.raw_bytes = image.raw_bytes;
  result.end = end;
  result.total_ns = now_ns() - began;
}

void unpack_pages(int in, std::span<const coldsnap_io_block> blocks, int out, const coldsnap_io_image& image,
                  coldsnap_io_image_result& result) {
  const uint64_t began = now_ns();
  Unpacking(in, blocks, out, image, result).run();
  result.total_ns = now_ns() - began;
}

}  // namespace coldsnap
