#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "selftest.hpp"

namespace {

// Pages of every kind: zeros, what LZ4 makes short, and what it cannot.
Bytes pages(size_t count, std::mt19937_64& random) {
  Bytes bytes(count * 4096);
  for (size_t page = 0; page < count; ++page) {
    const uint64_t kind = random() % 3;
    for (size_t i = 0; kind && i < 4096; ++i) bytes[page * 4096 + i] = static_cast<uint8_t>(kind == 1 ? random() : i / 64);
  }
  return bytes;
}

struct Image {
  coldsnap_io_image how;
  std::vector<coldsnap_io_block> blocks;
  Bytes raw;
};

Image random_image(const Bytes& bytes, std::vector<coldsnap_io_span>& spans, std::mt19937_64& random) {
  Image image{};
  for (uint64_t page = random() % 3, count; page < bytes.size() / 4096; page += count + random() % 4) {
    count = std::min<uint64_t>(1 + random() % 40, bytes.size() / 4096 - page);
    spans.push_back({page * 4096, count * 4096});
    const uint8_t* from = bytes.data() + page * 4096;
    image.raw.insert(image.raw.end(), from, from + count * 4096);
  }
  image.how.abi = COLDSNAP_IO_ABI;
  image.how.block_bytes = 4096u << (random() % 9);
  image.how.raw_bytes = image.raw.size();
  image.how.payload_offset = 4096 * (random() % 3);
  image.how.alignment = random() % 2 ? 4096 : 1;
  image.how.acceleration = 1 + random() % 9;
  image.how.workers = 1 + random() % 4;
  image.blocks.resize((image.raw.size() + image.how.block_bytes - 1) / image.how.block_bytes);
  return image;
}

Bytes through_a_pipe(int packed, Image& image) {
  int ends[2];
  REQUIRE(!pipe2(ends, O_CLOEXEC));
  Bytes back(image.raw.size() + 1);
  size_t got = 0;
  std::thread reader([&] {
    for (ssize_t count; (count = read(ends[0], back.data() + got, back.size() - got)) > 0;) got += static_cast<size_t>(count);
  });
  image.how.flags = COLDSNAP_IO_SEQUENTIAL;
  coldsnap_io_image_result result;
  const int status = coldsnap_io_unpack_pages(packed, image.blocks.data(), image.blocks.size(), ends[1], &image.how, &result);
  image.how.flags = 0;
  close(ends[1]);
  reader.join();
  close(ends[0]);
  REQUIRE(status == COLDSNAP_IO_OK);
  back.resize(got);
  return back;
}

// Whatever a payload is changed to, nothing is read or written beside the pages, and the checksum tells which block it was.
void broken_pages_are_named(int packed, Image& image, std::mt19937_64& random) {
  std::vector<uint64_t> filled;
  for (uint64_t block = 0; block < image.blocks.size(); ++block)
    if (image.blocks[block].length) filled.push_back(block);
  if (filled.empty()) return;
  const uint64_t chosen = filled[random() % filled.size()];
  uint64_t at = image.how.payload_offset;
  for (uint64_t block = 0; block < chosen; ++block)
    at += (image.blocks[block].length + image.how.alignment - 1) / image.how.alignment * image.how.alignment;
  Bytes payload(image.blocks[chosen].length);
  REQUIRE(pread(packed, payload.data(), payload.size(), static_cast<off_t>(at)) == static_cast<ssize_t>(payload.size()));
  payload[random() % payload.size()] ^= static_cast<uint8_t>(1 + random() % 255);
  REQUIRE(pwrite(packed, payload.data(), payload.size(), static_cast<off_t>(at)) == static_cast<ssize_t>(payload.size()));
  const int unpacked = new_file("broken");
  coldsnap_io_image_result result;
  const auto unpack = [&] {
    return coldsnap_io_unpack_pages(packed, image.blocks.data(), image.blocks.size(), unpacked, &image.how, &result);
  };
  REQUIRE(unpack() == COLDSNAP_IO_MISMATCH);
  REQUIRE(coldsnap_io_last_error()->extent == chosen);
  // With the checksum of the changed bytes it is for the decoder to stay inside.
  image.blocks[chosen].crc32 = coldsnap_io_crc32(0, payload.data(), payload.size());
  const int decoded = unpack();
  REQUIRE(decoded == COLDSNAP_IO_OK || decoded == COLDSNAP_IO_MISMATCH);
  close(unpacked);
}

}  // namespace

void pages_come_back(std::mt19937_64& random, const std::string& name) {
  const Bytes bytes = pages(1 + random() % 3000, random);
  const int fd = file_with(bytes, name);
  std::vector<uint8_t> zero(bytes.size() / 4096);
  REQUIRE(coldsnap_io_zero_pages(fd, zero.data(), zero.size()) == COLDSNAP_IO_OK);
  for (size_t page = 0; page < zero.size(); ++page)
    REQUIRE(zero[page] == std::all_of(&bytes[page * 4096], &bytes[page * 4096] + 4096, [](uint8_t byte) { return !byte; }));

  std::vector<coldsnap_io_span> spans;
  Image image = random_image(bytes, spans, random);
  const int packed = new_file(name + ".packed");
  coldsnap_io_image_result result;
  const auto pack = [&] {
    return coldsnap_io_pack_pages(fd, spans.data(), spans.size(), packed, &image.how, image.blocks.data(), image.blocks.size(),
                                  &result);
  };
  fault_plan(random() % 2 ? "preadv" : "pwritev", static_cast<long>(random() % 4), 1, EIO);
  const int failed = pack();
  REQUIRE(failed == COLDSNAP_IO_OK || failed == COLDSNAP_IO_SYSTEM || failed == COLDSNAP_IO_SHORT);
  fault_plan("preadv", -1, 0, 0);
  fault_plan("pwritev", -1, 0, 0);
  REQUIRE(pack() == COLDSNAP_IO_OK);

  for (const uint32_t backend : {COLDSNAP_IO_AUTO, COLDSNAP_IO_BUFFERED}) {
    image.how.backend = backend;
    const int unpacked = new_file(name + ".unpacked");
    REQUIRE(!ftruncate(unpacked, static_cast<off_t>(image.raw.size())));
    const int status = coldsnap_io_unpack_pages(packed, image.blocks.data(), image.blocks.size(), unpacked, &image.how, &result);
    REQUIRE(status == COLDSNAP_IO_OK);
    Bytes back(image.raw.size());
    REQUIRE(pread(unpacked, back.data(), back.size(), 0) == static_cast<ssize_t>(back.size()) && back == image.raw);
    close(unpacked);
  }
  REQUIRE(through_a_pipe(packed, image) == image.raw);
  broken_pages_are_named(packed, image, random);
  close(packed);
  close(fd);
}
