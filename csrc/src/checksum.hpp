// CRC-32 (the polynomial of zlib, gzip and PNG) and SHA-256, as fast as the processor can, with portable fallbacks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace coldsnap {

using Sha256Digest = std::array<uint8_t, 32>;

uint32_t crc32(uint32_t crc, const void* data, size_t length);

// Copy and checksum in one pass over the source: the bytes counted are the bytes stored. Stores bypass the cache.
uint32_t crc32_copy(uint32_t crc, void* destination, const void* source, size_t length);

// Copy past the cache: a destination far larger than the cache costs a read of every line otherwise.
void stream_copy(void* destination, const void* source, size_t length);

// The checksum of A followed by B from those of A and B. Slices are summed on different threads.
uint32_t crc32_combine(uint32_t first, uint32_t second, uint64_t second_length);

class Sha256 {
 public:
  struct Part {
    Sha256* stream;
    const uint8_t* data;
    size_t length;
  };
  // What update() does, for several streams, each once: two are worked through at a time.
  static void update_all(std::span<const Part> parts);

  void update(const void* data, size_t length);
  void update_zeros(uint64_t length);
  Sha256Digest finish();

 private:
  Part begin(const void* data, size_t length);  // completes the pending block; what is left goes to end()
  void end(const Part& part);
  static void advance(Part& first, Part& second);  // by the blocks that both have

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> pending_{};
  uint64_t length_ = 0;
};

unsigned sha256_lanes();  // streams that one core works through at once; 0: without the processor's own instructions
void limit_sha256_lanes(unsigned most);

namespace portable {  // reachable from the tests on processors that have better
uint32_t crc32(uint32_t crc, const uint8_t* data, size_t length);
void sha256_blocks(uint32_t state[8], const uint8_t* data, size_t blocks);
}  // namespace portable

}  // namespace coldsnap
