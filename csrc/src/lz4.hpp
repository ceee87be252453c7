// LZ4 blocks (the block format of lz4 1.x, without a frame), from and into memory.
//
// Our own, because there is little of it and a run-time liblz4 is not on every machine. It is held to the reference library by tests.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace coldsnap::lz4 {

// How far beyond its end a buffer given to decode() must be readable (source) and writable (destination).
constexpr size_t kSlack = 64;

constexpr size_t kMaxBlock = size_t{4} << 20;

// Positions that the encoder remembers; kept by the caller, since it is too large for a stack.
using Table = std::array<uint32_t, 1 << 14>;

// Bytes written, or 0 when `length` bytes do not become at most `capacity`.
size_t encode(const uint8_t* source, size_t length, uint8_t* destination, size_t capacity, uint32_t acceleration, Table& table);

// True when the block is well-formed and gives exactly `length` bytes. Whatever the block holds, nothing outside the two buffers
// and their slack is touched.
bool decode(const uint8_t* source, size_t source_length, uint8_t* destination, size_t length);

}  // namespace coldsnap::lz4
