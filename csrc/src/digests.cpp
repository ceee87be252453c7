#include "digests.hpp"

#include <algorithm>
#include <cstring>

#include "error.hpp"

namespace coldsnap {

Digests::Digests(std::span<const coldsnap_io_extent> extents, const Layout& layout)
    : extents_(extents),
      layout_(layout),
      first_(layout.segments.data()),
      crcs_(layout.segments.size()),
      shas_(extents.size(), Sha256().finish()) {}

std::vector<coldsnap_io_extent> Digests::found() const {
  std::vector<coldsnap_io_extent> found(extents_.begin(), extents_.end());
  for (auto& extent : found) extent.crc32 = 0;
  // Segments of one extent are in ascending order, whatever lies between them.
  for (size_t i = 0; i < crcs_.size(); ++i) {
    const Segment& segment = layout_.segments[i];
    found[segment.extent].crc32 = crc32_combine(found[segment.extent].crc32, crcs_[i], segment.length);
  }
  for (size_t i = 0; i < found.size(); ++i) std::ranges::copy(shas_[i], found[i].sha256);
  return found;
}

uint64_t Digests::verify() const { return compare_digests(extents_, found()); }

uint64_t compare_digests(std::span<const coldsnap_io_extent> expected, std::span<const coldsnap_io_extent> found) {
  uint64_t compared = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i].verify == COLDSNAP_IO_VERIFY_NONE) continue;
    ++compared;
    if (expected[i].crc32 != found[i].crc32) fail_mismatch(i, "CRC32", hex(expected[i].crc32), hex(found[i].crc32));
    if (expected[i].verify == COLDSNAP_IO_VERIFY_CRC32_SHA256 && std::memcmp(expected[i].sha256, found[i].sha256, 32))
      fail_mismatch(i, "SHA-256", hex(expected[i].sha256, 32), hex(found[i].sha256, 32));
  }
  return compared;
}

void Summing::take_sha(const Segment& segment, const uint8_t* bytes) {
  const coldsnap_io_extent& extent = digests_.extents_[segment.extent];
  if (segment.file_offset == extent.file_offset) sha_ = Sha256();
  sha_.update(bytes, segment.length);
  if (segment.file_offset + segment.length == extent.file_offset + extent.length)
    digests_.shas_[segment.extent] = sha_.finish();
}

void Summing::take(const Segment& segment, const uint8_t* bytes) {
  if (digests_.wants_crc(segment)) digests_.set_crc(segment, crc32(0, bytes, segment.length));
  if (digests_.wants_sha(segment)) take_sha(segment, bytes);
}

void Summing::copy_and_take(const Segment& segment, const uint8_t* bytes) {
  auto* to = reinterpret_cast<uint8_t*>(segment.address);
  if (digests_.wants_crc(segment))
    digests_.set_crc(segment, crc32_copy(0, to, bytes, segment.length));
  else
    stream_copy(to, bytes, segment.length);
  if (digests_.wants_sha(segment)) take_sha(segment, to);
}

}  // namespace coldsnap
