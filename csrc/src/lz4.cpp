#include "lz4.hpp"

#include <bit>
#include <cstring>

namespace coldsnap::lz4 {

namespace {

// A sequence is a token (length of the literals, length of the match less 4, a nibble each; 15 goes on in further bytes), the
// literals, and the distance of the match in 16 bits. The last sequence is literals alone.
constexpr size_t kMinMatch = 4;
constexpr size_t kLastLiterals = 5;   // the last 5 bytes of a block are literals,
constexpr size_t kMatchLimit = 12;    // and no match starts in its last 12: what lets decoders copy in strides
constexpr size_t kMaxDistance = 65535;
constexpr unsigned kNibble = 15;
constexpr size_t kFar = 64;           // more than a token, 14 literals and a match of 18 bytes, and what must follow them
constexpr unsigned kSkipBits = 6;     // misses before the search takes a longer step

template <typename T>
T load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <size_t kBytes>
void copy(uint8_t* to, const uint8_t* from) {
  std::memcpy(to, from, kBytes);
}

uint32_t hash(const uint8_t* at) {  // of five bytes
  return static_cast<uint32_t>(((load<uint64_t>(at) << 24) * 889523592379ULL) >> (64 - 14));
}

// How many bytes are equal; `end` bounds `one`.
size_t equal(const uint8_t* one, const uint8_t* other, const uint8_t* end) {
  const uint8_t* const start = one;
  while (one + 8 <= end) {
    if (const uint64_t differ = load<uint64_t>(one) ^ load<uint64_t>(other))
      return static_cast<size_t>(one - start) + static_cast<size_t>(std::countr_zero(differ)) / 8;
    one += 8;
    other += 8;
  }
  while (one < end && *one == *other) ++one, ++other;
  return static_cast<size_t>(one - start);
}

uint8_t* put_length(uint8_t* to, size_t rest) {
  for (; rest >= 255; rest -= 255) *to++ = 255;
  *to++ = static_cast<uint8_t>(rest);
  return to;
}

// Token and literals; nullptr when they, and `more` bytes after them, do not fit.
uint8_t* put_literals(uint8_t* to, const uint8_t* end, const uint8_t* from, size_t count, size_t more, uint8_t** token) {
  if (static_cast<size_t>(end - to) < 1 + count / 255 + 1 + count + more) return nullptr;
  *token = to++;
  **token = static_cast<uint8_t>(count < kNibble ? count << 4 : kNibble << 4);
  if (count >= kNibble) to = put_length(to, count - kNibble);
  std::memcpy(to, from, count);
  return to + count;
}

// The further bytes of a length; false when the block ends in them, or the length is absurd.
inline bool get_length(const uint8_t*& from, const uint8_t* end, size_t& length) {
  for (;;) {
    if (from >= end) return false;
    const uint8_t byte = *from++;
    length += byte;
    if (byte != 255) return true;
    if (length > kMaxBlock) return false;
  }
}

inline void copy_match(uint8_t* to, size_t distance, size_t length) {
  const uint8_t* from = to - distance;
  uint8_t* const end = to + length;
  if (distance >= 32) {
    do copy<32>(to, from), to += 32, from += 32;
    while (to < end);
  } else if (distance >= 16) {
    do copy<16>(to, from), to += 16, from += 16;
    while (to < end);
  } else if (distance >= 8) {
    do copy<8>(to, from), to += 8, from += 8;
    while (to < end);
  } else {
    // The match overlaps itself: a pattern of `distance` bytes, written in strides that keep its phase.
    uint8_t pattern[16];
    for (size_t i = 0; i < sizeof pattern; ++i) pattern[i] = from[i % distance];
    const size_t stride = sizeof pattern / distance * distance;
    for (; to < end; to += stride) copy<16>(to, pattern);
  }
}

}  // namespace

size_t encode(const uint8_t* source, size_t length, uint8_t* destination, size_t capacity, uint32_t acceleration, Table& table) {
  const uint8_t* const end = source + length;
  const uint8_t* anchor = source;  // what is before it is written
  uint8_t* to = destination;
  const uint8_t* const to_end = destination + capacity;
  uint8_t* token;

  if (length > kMatchLimit) {
    const uint8_t* const match_start_limit = end - kMatchLimit;
    const uint8_t* const match_end_limit = end - kLastLiterals;
    table.fill(0);
    const uint8_t* at = source + 1;
    uint32_t misses = acceleration << kSkipBits;
    while (at <= match_start_limit) {
      uint32_t& remembered = table[hash(at)];
      const uint8_t* match = source + remembered;
      remembered = static_cast<uint32_t>(at - source);
      if (static_cast<size_t>(at - match) > kMaxDistance || load<uint32_t>(match) != load<uint32_t>(at)) {
        at += misses++ >> kSkipBits;
        continue;
      }
      while (at > anchor && match > source && at[-1] == match[-1]) --at, --match;
      to = put_literals(to, to_end, anchor, static_cast<size_t>(at - anchor), 2, &token);
      if (!to) return 0;
      const auto distance = static_cast<uint16_t>(at - match);
      std::memcpy(to, &distance, 2);
      to += 2;
      const size_t more = equal(at + kMinMatch, match + kMinMatch, match_end_limit);
      if (static_cast<size_t>(to_end - to) < more / 255 + 1) return 0;
      *token |= static_cast<uint8_t>(more < kNibble ? more : kNibble);
      if (more >= kNibble) to = put_length(to, more - kNibble);
      anchor = at += kMinMatch + more;
      if (at > match_start_limit) break;
      table[hash(at - 2)] = static_cast<uint32_t>(at - 2 - source);
      misses = acceleration << kSkipBits;
    }
  }
  to = put_literals(to, to_end, anchor, static_cast<size_t>(end - anchor), 0, &token);
  return to ? static_cast<size_t>(to - destination) : 0;
}

bool decode(const uint8_t* source, size_t source_length, uint8_t* destination, size_t length) {
  const uint8_t* from = source;
  const uint8_t* const from_end = source + source_length;
  uint8_t* to = destination;
  uint8_t* const to_end = destination + length;

  // Where neither buffer is near its end, a short sequence is a few copies of fixed size: most sequences are short.
  const uint8_t* const from_far = source_length > kFar ? from_end - kFar : source;
  const uint8_t* const to_far = length > kFar ? to_end - kFar : destination;

  while (from < from_end) {
    const unsigned token = *from++;
    size_t literals = token >> 4;
    if (literals != kNibble && from < from_far && to < to_far) {
      copy<16>(to, from);
      const size_t distance = load<uint16_t>(from + literals);
      const uint8_t* const match = to + literals - distance;
      const size_t count = token & kNibble;
      if (count != kNibble && distance >= 8 && distance <= static_cast<size_t>(to + literals - destination)) {
        from += literals + 2;
        to += literals;
        copy<8>(to, match);
        copy<8>(to + 8, match + 8);
        copy<2>(to + 16, match + 16);
        to += count + kMinMatch;
        continue;
      }
    }
    if (literals == kNibble && !get_length(from, from_end, literals)) return false;
    if (literals > static_cast<size_t>(from_end - from) || literals > static_cast<size_t>(to_end - to)) return false;
    copy<16>(to, from);
    for (size_t done = 16; done < literals; done += 32) copy<32>(to + done, from + done);
    from += literals;
    to += literals;
    if (from == from_end) return to == to_end;

    if (from_end - from < 2 || static_cast<size_t>(to_end - to) < kMatchLimit) return false;
    const size_t distance = load<uint16_t>(from);
    from += 2;
    if (distance == 0 || distance > static_cast<size_t>(to - destination)) return false;
    size_t match = token & kNibble;
    if (match == kNibble && !get_length(from, from_end, match)) return false;
    match += kMinMatch;
    if (match + kLastLiterals > static_cast<size_t>(to_end - to)) return false;
    copy_match(to, distance, match);
    to += match;
  }
  return false;
}

}  // namespace coldsnap::lz4
