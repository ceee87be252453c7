#include "error.hpp"

#include <cstdio>
#include <cstring>

namespace coldsnap {

void fail(coldsnap_io_status status, const std::string& message) { throw Error(status, message); }

void fail_errno(const std::string& what, int error) {
  const bool full = error == ENOSPC || error == EDQUOT;
  char text[128];
  // The GNU variant returns the text, which need not be in the buffer.
  Error failure(full ? COLDSNAP_IO_SHORT : COLDSNAP_IO_SYSTEM, what + ": " + strerror_r(error, text, sizeof text));
  failure.os_error = error;
  throw failure;
}

void fail_refused_direct(int error) {
  Error failure(COLDSNAP_IO_UNAVAILABLE, "the filesystem refuses to open the file for direct transfers");
  failure.os_error = error;
  throw failure;
}

void fail_mismatch(uint64_t extent, const std::string& what, std::string expected, std::string actual) {
  Error failure(COLDSNAP_IO_MISMATCH, "extent " + std::to_string(extent) + ": the " + what + " of its bytes is " + actual +
                                          ", expected " + expected);
  failure.extent = extent;
  failure.expected = std::move(expected);
  failure.actual = std::move(actual);
  throw failure;
}

std::string hex(const uint8_t* bytes, size_t length) {
  std::string text(2 * length, '0');
  static const char digits[] = "0123456789abcdef";
  for (size_t i = 0; i < length; ++i) {
    text[2 * i] = digits[bytes[i] >> 4];
    text[2 * i + 1] = digits[bytes[i] & 15];
  }
  return text;
}

std::string hex(uint32_t crc) {
  char text[9];
  std::snprintf(text, sizeof text, "%08x", crc);
  return text;
}

}  // namespace coldsnap
