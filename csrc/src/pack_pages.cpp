#include "page_image.hpp"

#include <algorithm>
#include <cstring>
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

bool all_zero(const uint8_t* data, uint64_t length) {
  // Compared with itself, one word further: memcmp is the fastest loop there is. Most pages differ in their first words.
  uint64_t first;
  std::memcpy(&first, data, sizeof first);
  return first == 0 && std::memcmp(data, data + sizeof first, length - sizeof first) == 0;
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

}  // namespace coldsnap
