// What each extent should add up to, and what it did.
#pragma once

#include <span>
#include <vector>

#include "checksum.hpp"
#include "layout.hpp"

namespace coldsnap {

// Sums of the segments of one layout. Threads write disjoint elements; finish() runs after they have ended.
class Digests {
 public:
  Digests(std::span<const coldsnap_io_extent> extents, const Layout& layout);

  bool wants_crc(const Segment& segment) const { return extents_[segment.extent].verify != COLDSNAP_IO_VERIFY_NONE; }
  bool wants_sha(const Segment& segment) const {
    return extents_[segment.extent].verify == COLDSNAP_IO_VERIFY_CRC32_SHA256;
  }
  void set_crc(const Segment& segment, uint32_t crc) { crcs_[static_cast<size_t>(&segment - first_)] = crc; }

  // The digests of every extent that asked for one: crc32 and sha256 as found, the rest as given.
  std::vector<coldsnap_io_extent> found() const;
  // Compare them with what was expected. Returns how many extents were compared; throws MISMATCH.
  uint64_t verify() const;

 private:
  friend class Summing;
  std::span<const coldsnap_io_extent> extents_;
  const Layout& layout_;
  const Segment* first_;
  std::vector<uint32_t> crcs_;
  std::vector<Sha256Digest> shas_;
};

// One thread's work on digests; carries the SHA-256 of an extent from slice to slice.
class Summing {
 public:
  explicit Summing(Digests& digests) : digests_(digests) {}
  void take(const Segment& segment, const uint8_t* bytes);
  // Copy the segment to its final address on the way; `bytes` is read once for copy and CRC.
  void copy_and_take(const Segment& segment, const uint8_t* bytes);

 private:
  void take_sha(const Segment& segment, const uint8_t* bytes);

  Digests& digests_;
  Sha256 sha_;
};

// Throws MISMATCH for the first extent whose digests differ. Returns how many were compared.
uint64_t compare_digests(std::span<const coldsnap_io_extent> expected, std::span<const coldsnap_io_extent> found);

}  // namespace coldsnap
