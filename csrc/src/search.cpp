#include "search.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "error.hpp"
#include "file.hpp"
#include "scratch.hpp"

namespace coldsnap {
namespace {

// A pattern of 64 bytes, wherever it begins, covers eight whole bytes from some multiple of 32. So one word in 32 bytes of the
// file is looked at, and each pattern is known by the 32 words that can be the one.
constexpr uint64_t kStride = 32, kWord = 8;
constexpr uint64_t kMinPattern = 64, kMaxPattern = 4096, kMaxCount = 1024;
static_assert(kStride - 1 + kWord <= kMinPattern);
constexpr uint64_t kChunk = 128 << 10;  // stays in the core's cache, with the filter

uint64_t word_at(const uint8_t* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, kWord);
  return word;
}

class Patterns {
 public:
  Patterns(const uint8_t* patterns, uint64_t count, uint64_t bytes)
      : patterns_(patterns), bytes_(bytes), filter_(size_t{1} << (kFilterBits - 6)), first_((size_t{1} << kBucketBits) + 1) {
    for (uint64_t i = 0; i < count * kStride; ++i) {
      const uint64_t hash = hash_of(word_at(word_of(i)));
      filter_[hash >> (64 - kFilterBits + 6)] |= bit(hash);
      ++first_[(hash >> (64 - kBucketBits)) + 1];
    }
    for (size_t i = 1; i < first_.size(); ++i) first_[i] += first_[i - 1];
    entries_.resize(count * kStride);
    std::vector<uint32_t> next(first_.begin(), first_.end() - 1);
    for (uint64_t i = 0; i < entries_.size(); ++i)
      entries_[next[hash_of(word_at(word_of(i))) >> (64 - kBucketBits)]++] = static_cast<uint32_t>(i);
  }

  // Calls found(start, pattern) for each pattern that covers data[at] as one of its words and lies in data[0, length).
  template <typename Found>
  void look(const uint8_t* data, uint64_t length, uint64_t at, const Found& found) const {
    const uint64_t word = word_at(data + at), hash = hash_of(word);
    if (!(filter_[hash >> (64 - kFilterBits + 6)] & bit(hash))) return;
    const uint64_t bucket = hash >> (64 - kBucketBits);
    for (uint32_t i = first_[bucket]; i < first_[bucket + 1]; ++i) {
      const uint64_t pattern = entries_[i] / kStride, within = entries_[i] % kStride;
      if (within > at || at - within + bytes_ > length || word_at(word_of(entries_[i])) != word) continue;
      if (!std::memcmp(patterns_ + pattern * bytes_, data + at - within, bytes_)) found(at - within, pattern);
    }
  }

 private:
  static constexpr unsigned kFilterBits = 20, kBucketBits = 16;
  static uint64_t hash_of(uint64_t word) { return word * 0x9e3779b97f4a7c15; }
  static uint64_t bit(uint64_t hash) { return uint64_t{1} << (hash >> (64 - kFilterBits) & 63); }
  const uint8_t* word_of(uint64_t entry) const { return patterns_ + entry / kStride * bytes_ + entry % kStride; }

  const uint8_t* patterns_;
  uint64_t bytes_;
  std::vector<uint64_t> filter_;
  std::vector<uint32_t> first_, entries_;
};

void check(uint64_t offset, uint64_t length, uint64_t size, uint64_t count, uint64_t pattern_bytes) {
  if (!count || count > kMaxCount || pattern_bytes < kMinPattern || pattern_bytes > kMaxPattern)
    fail(COLDSNAP_IO_INVALID, std::to_string(count) + " patterns of " + std::to_string(pattern_bytes) +
                                  " bytes: 1 to 1024 patterns of 64 to 4096 bytes can be searched for");
  if (offset > size || length > size - offset)
    fail(COLDSNAP_IO_INVALID, "the range ends beyond the file of " + std::to_string(size) + " bytes");
}

}  // namespace

std::vector<coldsnap_io_match> search(int fd, uint64_t offset, uint64_t length, const uint8_t* patterns, uint64_t count,
                                      uint64_t pattern_bytes) {
  const uint64_t size = file_size(fd);
  check(offset, length, size, count, pattern_bytes);
  const Patterns known(patterns, count, pattern_bytes);
  Scratch scratch(kChunk + kMaxPattern);
  std::vector<coldsnap_io_match> matches;
  for (uint64_t at = offset, end = offset + length; at < end; at += kChunk) {
    const uint64_t starts = std::min(kChunk, end - at);
    const uint64_t bytes = std::min(starts + pattern_bytes - 1, size - at);
    read_exact(fd, scratch.get(), bytes, at);
    for (uint64_t word = 0; word + kWord <= bytes; word += kStride)
      known.look(scratch.get(), bytes, word, [&](uint64_t start, uint64_t pattern) {
        if (start < starts) matches.push_back({at + start, pattern});
      });
  }
  std::ranges::sort(matches, [](const auto& one, const auto& other) {
    return std::pair(one.file_offset, one.pattern) < std::pair(other.file_offset, other.pattern);
  });
  return matches;
}

}  // namespace coldsnap
