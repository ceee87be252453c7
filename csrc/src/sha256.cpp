#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

#include "checksum.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace coldsnap {
namespace {

alignas(64) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t big_endian(const uint8_t* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, 4);
  return __builtin_bswap32(word);
}

#if defined(__x86_64__)

// The SHA extensions keep the state as ABEF and CDGH and do two rounds an instruction. Each waits for the one before it, twice as
// long as the processor needs to begin another: with the blocks of several streams side by side none is idle.
template <int kLanes>
[[gnu::target("sha,sse4.1,ssse3")]] void blocks_sha_ni(uint32_t* const (&states)[kLanes], const uint8_t* (&data)[kLanes],
                                                       size_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  __m128i abef[kLanes], cdgh[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    const __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(states[lane]));
    const __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(states[lane] + 4));
    const __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1);
    const __m128i efgh = _mm_shuffle_epi32(hgfe, 0x1b);
    abef[lane] = _mm_alignr_epi8(cdab, efgh, 8);
    cdgh[lane] = _mm_blend_epi16(efgh, cdab, 0xf0);
  }

  for (; blocks; --blocks) {
    __m128i abef_before[kLanes], cdgh_before[kLanes], words[kLanes][4];
    for (int lane = 0; lane < kLanes; ++lane) abef_before[lane] = abef[lane], cdgh_before[lane] = cdgh[lane];
#pragma GCC unroll 16
    for (int group = 0; group < 16; ++group) {
#pragma GCC unroll 4
      for (int lane = 0; lane < kLanes; ++lane) {
        __m128i& now = words[lane][group & 3];
        if (group < 4) {
          now = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data[lane]) + group), swap);
        } else {
          const __m128i last = words[lane][(group + 3) & 3], before_last = words[lane][(group + 2) & 3];
          now = _mm_sha256msg1_epu32(now, words[lane][(group + 1) & 3]);
          now = _mm_sha256msg2_epu32(_mm_add_epi32(now, _mm_alignr_epi8(last, before_last, 4)), last);
        }
        const __m128i sum = _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(kRound) + group));
        cdgh[lane] = _mm_sha256rnds2_epu32(cdgh[lane], abef[lane], sum);
        abef[lane] = _mm_sha256rnds2_epu32(abef[lane], cdgh[lane], _mm_shuffle_epi32(sum, 0x0e));
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      abef[lane] = _mm_add_epi32(abef[lane], abef_before[lane]);
      cdgh[lane] = _mm_add_epi32(cdgh[lane], cdgh_before[lane]);
      data[lane] += 64;
    }
  }

  for (int lane = 0; lane < kLanes; ++lane) {
    const __m128i feba = _mm_shuffle_epi32(abef[lane], 0x1b);
    const __m128i dchg = _mm_shuffle_epi32(cdgh[lane], 0xb1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(states[lane]), _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(states[lane] + 4), _mm_alignr_epi8(dchg, feba, 8));
  }
}

void one_lane(uint32_t state[8], const uint8_t* data, size_t blocks) {
  uint32_t* const states[1] = {state};
  const uint8_t* places[1] = {data};
  blocks_sha_ni<1>(states, places, blocks);
}

bool has_sha() {
  // GCC 12's __builtin_cpu_supports does not know "sha": leaf 7, EBX bit 29.
  uint32_t a = 7, b = 0, c = 0, d = 0;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return (b >> 29 & 1) && __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
}

#endif

std::atomic<unsigned> limit = ~0u;

unsigned lanes() {
#if defined(__x86_64__)
  static const unsigned best = has_sha() ? 2 : 0;  // three measured no faster, four slower: the registers are used up
  return std::min(best, limit.load(std::memory_order_relaxed));
#else
  return 0;
#endif
}

void hash_blocks(uint32_t state[8], const uint8_t* data, size_t blocks) {
#if defined(__x86_64__)
  if (lanes()) return one_lane(state, data, blocks);
#endif
  portable::sha256_blocks(state, data, blocks);
}

}  // namespace

void portable::sha256_blocks(uint32_t state[8], const uint8_t* data, size_t blocks) {
  for (; blocks; --blocks, data += 64) {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; ++i) w[i] = big_endian(data + 4 * i);
    for (int i = 16; i < 64; ++i) {
      const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    std::copy_n(state, 8, s);
    for (int i = 0; i < 64; ++i) {
      const uint32_t e = std::rotr(s[4], 6) ^ std::rotr(s[4], 11) ^ std::rotr(s[4], 25);
      const uint32_t first = s[7] + e + ((s[4] & s[5]) ^ (~s[4] & s[6])) + kRound[i] + w[i];
      const uint32_t a = std::rotr(s[0], 2) ^ std::rotr(s[0], 13) ^ std::rotr(s[0], 22);
      const uint32_t second = a + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      std::copy_backward(s, s + 7, s + 8);
      s[4] += first;
      s[0] = first + second;
    }
    for (int i = 0; i < 8; ++i) state[i] += s[i];
  }
}

Sha256::Part Sha256::begin(const void* data, size_t length) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  const size_t held = length_ % 64;
  length_ += length;
  if (held && length) {
    const size_t take = std::min(length, 64 - held);
    std::memcpy(pending_.data() + held, bytes, take);
    bytes += take;
    length -= take;
    if (held + take < 64) return {this, bytes, 0};
    hash_blocks(state_.data(), pending_.data(), 1);
    pending_.fill(0);  // a whole block of what was hashed stays nowhere
  }
  return {this, bytes, length};
}

void Sha256::end(const Part& part) {
  hash_blocks(state_.data(), part.data, part.length / 64);
  std::memcpy(pending_.data(), part.data + part.length / 64 * 64, part.length % 64);
}

void Sha256::update(const void* data, size_t length) {
  const Part part = begin(data, length);
  if (part.length) end(part);
}

void Sha256::update_all(std::span<const Part> parts) {
  Part first{}, second{};
  for (const Part& part : parts) {
    Part& idle = first.length < 64 ? first : second;
    if (idle.length) idle.stream->end(idle);
    idle = part.stream->begin(part.data, part.length);
    advance(first, second);
  }
  if (first.length) first.stream->end(first);
  if (second.length) second.stream->end(second);
}

void Sha256::advance([[maybe_unused]] Part& first, [[maybe_unused]] Part& second) {
#if defined(__x86_64__)
  const size_t blocks = std::min(first.length, second.length) / 64;
  if (!blocks || lanes() < 2) return;
  uint32_t* const states[2] = {first.stream->state_.data(), second.stream->state_.data()};
  const uint8_t* places[2] = {first.data, second.data};
  blocks_sha_ni<2>(states, places, blocks);
  for (Part* part : {&first, &second}) part->data += blocks * 64, part->length -= blocks * 64;
#endif
}

unsigned sha256_lanes() { return lanes(); }

void limit_sha256_lanes(unsigned most) { limit.store(most, std::memory_order_relaxed); }

void Sha256::update_zeros(uint64_t length) {
  static const std::array<uint8_t, 65536> zeros{};
  for (; length; length -= std::min<uint64_t>(length, zeros.size()))
    update(zeros.data(), std::min<uint64_t>(length, zeros.size()));
}

Sha256Digest Sha256::finish() {
  const uint64_t bits = __builtin_bswap64(length_ * 8);
  static const std::array<uint8_t, 64> padding{0x80};
  update(padding.data(), 1 + (119 - length_ % 64) % 64);
  update(&bits, 8);
  Sha256Digest digest;
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = __builtin_bswap32(state_[i]);
    std::memcpy(digest.data() + 4 * i, &word, 4);
  }
  return digest;
}

}  // namespace coldsnap
