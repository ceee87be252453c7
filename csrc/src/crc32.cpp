#include "checksum.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace coldsnap {
namespace {

constexpr uint32_t kPolynomial = 0xedb88320;  // 0x04c11db7, bits reversed

constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? kPolynomial : 0);
    tables[0][byte] = value;
  }
  for (size_t t = 1; t < 8; ++t)
    for (uint32_t byte = 0; byte < 256; ++byte)
      tables[t][byte] = (tables[t - 1][byte] >> 8) ^ tables[0][tables[t - 1][byte] & 255];
  return tables;
}
constexpr auto kTables = make_tables();

// Without the inversions at both ends, so that partial results can be continued.
uint32_t by_table(uint32_t state, const uint8_t* data, size_t length) {
  for (; length >= 8; data += 8, length -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= state;
    state = 0;
    for (int i = 0; i < 8; ++i) state ^= kTables[7 - i][(word >> (8 * i)) & 255];
  }
  for (; length; --length) state = (state >> 8) ^ kTables[0][(state ^ *data++) & 255];
  return state;
}

// Polynomials over GF(2) modulo P, reflected: bit 31 is x^0.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ (b & 1 ? kPolynomial : 0);
  }
  return product;
}

constexpr uint32_t power_of_x(uint64_t exponent) {
  uint32_t result = 1u << 31, square = 1u << 30;
  for (; exponent; exponent >>= 1) {
    if (exponent & 1) result = multiply(square, result);
    square = multiply(square, square);
  }
  return result;
}

#if defined(__x86_64__)

// Factors that move 64-bit halves `bits` further in a reflected message (Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ"); the shift makes up for the bit that reflection loses.
constexpr uint64_t low_factor(unsigned bits) { return uint64_t{power_of_x(bits + 32)} << 1; }
constexpr uint64_t high_factor(unsigned bits) { return uint64_t{power_of_x(bits - 32)} << 1; }
static_assert(low_factor(512) == 0x154442bd4 && high_factor(512) == 0x1c6e41596);

// The hardware's prefetcher stops at every page; 2 KiB ahead was the best of 256 bytes to 4 KiB.
inline void fetch_ahead(const uint8_t* from) {
  _mm_prefetch(reinterpret_cast<const char*>(from + 2048), _MM_HINT_T0);
  _mm_prefetch(reinterpret_cast<const char*>(from + 2112), _MM_HINT_T0);
}

[[gnu::target("pclmul,sse4.1")]] inline __m128i fold(__m128i state, __m128i factors, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(state, factors, 0x00);
  const __m128i high = _mm_clmulepi64_si128(state, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// The lanes are one message: fold each into the next, then let the table take the last 16 bytes.
[[gnu::target("pclmul,sse4.1")]] uint32_t reduce(const __m128i* lanes, size_t count) {
  const __m128i factors = _mm_set_epi64x(high_factor(128), low_factor(128));
  __m128i state = lanes[0];
  for (size_t i = 1; i < count; ++i) state = fold(state, factors, lanes[i]);
  alignas(16) uint8_t last[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(last), state);
  return by_table(0, last, sizeof last);
}

template <bool kCopy>
[[gnu::target("pclmul,sse4.1")]] uint32_t fold_128(uint32_t state, uint8_t* to, const uint8_t* from, size_t blocks) {
  const __m128i factors = _mm_set_epi64x(high_factor(512), low_factor(512));
  __m128i lanes[4] = {_mm_cvtsi32_si128(static_cast<int>(state)), _mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128()};
  for (size_t block = 0; block < blocks; ++block, from += 64) {
    for (int i = 0; i < 4; ++i) {
      const __m128i data = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
      if constexpr (kCopy) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, data);
      lanes[i] = block ? fold(lanes[i], factors, data) : _mm_xor_si128(lanes[i], data);
    }
    if constexpr (kCopy) to += 64;
  }
  return reduce(lanes, 4);
}

template <bool kCopy>
[[gnu::target("vpclmulqdq,avx2,pclmul,sse4.1")]] uint32_t fold_256(uint32_t state, uint8_t* to, const uint8_t* from,
                                                                   size_t blocks) {
  const __m256i factors = _mm256_set_epi64x(high_factor(1024), low_factor(1024), high_factor(1024), low_factor(1024));
  __m256i lanes[4] = {_mm256_set_epi64x(0, 0, 0, state), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  for (size_t block = 0; block < blocks; ++block, from += 128) {
    fetch_ahead(from);
    for (int i = 0; i < 4; ++i) {
      const __m256i data = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i);
      if constexpr (kCopy) _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + i, data);
      if (block) {
        const __m256i low = _mm256_clmulepi64_epi128(lanes[i], factors, 0x00);
        const __m256i high = _mm256_clmulepi64_epi128(lanes[i], factors, 0x11);
        lanes[i] = _mm256_xor_si256(_mm256_xor_si256(low, high), data);
      } else {
        lanes[i] = _mm256_xor_si256(lanes[i], data);
      }
    }
    if constexpr (kCopy) to += 128;
  }
  alignas(32) __m128i halves[8];
  for (int i = 0; i < 4; ++i) _mm256_store_si256(reinterpret_cast<__m256i*>(halves) + i, lanes[i]);
  return reduce(halves, 8);
}

bool has_carryless() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }
bool has_wide_carryless() { return has_carryless() && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx2"); }

template <bool kCopy>
uint32_t by_folding(uint32_t state, uint8_t* to, const uint8_t* from, size_t length) {
  static const size_t block = has_wide_carryless() ? 128 : has_carryless() ? 64 : 0;
  const size_t blocks = block ? length / block : 0;
  if (blocks) {
    state = block == 128 ? fold_256<kCopy>(state, to, from, blocks) : fold_128<kCopy>(state, to, from, blocks);
    from += blocks * block;
    if constexpr (kCopy) to += blocks * block;
  }
  const size_t rest = length - blocks * block;
  if constexpr (kCopy) std::memcpy(to, from, rest);
  return by_table(state, from, rest);
}

[[gnu::target("avx2")]] size_t stream_256(uint8_t* to, const uint8_t* from, size_t length) {
  size_t done = 0;
  for (; done + 128 <= length; done += 128) {
    __m256i data[4];
    for (int i = 0; i < 4; ++i) data[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + done) + i);
    fetch_ahead(from + done);
    for (int i = 0; i < 4; ++i) _mm256_stream_si256(reinterpret_cast<__m256i*>(to + done) + i, data[i]);
  }
  return done;
}

size_t head_bytes(const void* to, size_t length) {
  const size_t head = -reinterpret_cast<uintptr_t>(to) & 31;  // streaming stores need aligned destinations
  return head < length ? head : length;
}

#endif

}  // namespace

uint32_t portable::crc32(uint32_t crc, const uint8_t* data, size_t length) { return ~by_table(~crc, data, length); }

#if defined(__x86_64__)

uint32_t crc32(uint32_t crc, const void* data, size_t length) {
  return ~by_folding<false>(~crc, nullptr, static_cast<const uint8_t*>(data), length);
}

uint32_t crc32_copy(uint32_t crc, void* destination, const void* source, size_t length) {
  auto* to = static_cast<uint8_t*>(destination);
  const auto* from = static_cast<const uint8_t*>(source);
  const size_t head = head_bytes(to, length);
  std::memcpy(to, from, head);
  const uint32_t state = by_table(~crc, from, head);
  const uint32_t result = ~by_folding<true>(state, to + head, from + head, length - head);
  _mm_sfence();  // streaming stores are weakly ordered: another thread is told that they have happened
  return result;
}

void stream_copy(void* destination, const void* source, size_t length) {
  static const bool wide = __builtin_cpu_supports("avx2");
  auto* to = static_cast<uint8_t*>(destination);
  const auto* from = static_cast<const uint8_t*>(source);
  size_t done = wide ? head_bytes(to, length) : 0;
  std::memcpy(to, from, done);
  if (wide) done += stream_256(to + done, from + done, length - done);
  std::memcpy(to + done, from + done, length - done);
  _mm_sfence();
}

#else

uint32_t crc32(uint32_t crc, const void* data, size_t length) {
  return portable::crc32(crc, static_cast<const uint8_t*>(data), length);
}

uint32_t crc32_copy(uint32_t crc, void* destination, const void* source, size_t length) {
  std::memcpy(destination, source, length);
  return crc32(crc, destination, length);
}

void stream_copy(void* destination, const void* source, size_t length) { std::memcpy(destination, source, length); }

#endif

uint32_t crc32_combine(uint32_t first, uint32_t second, uint64_t second_length) {
  // Slices have equal lengths, so their power is worth remembering.
  static thread_local uint64_t known_length = 0;
  static thread_local uint32_t known_power = 1u << 31;
  if (second_length != known_length) {
    known_length = second_length;
    known_power = power_of_x(8 * second_length);
  }
  return multiply(known_power, first) ^ second;
}

}  // namespace coldsnap
