// Failures inside the library are exceptions; abi.cpp turns them into a status and the thread's last error.
#pragma once

#include <cerrno>
#include <cstdint>
#include <exception>
#include <string>

#include "coldsnap_io.h"

namespace coldsnap {

struct Error : std::exception {
  coldsnap_io_status status;
  std::string message;
  int os_error = 0;
  int driver_error = 0;
  uint64_t extent = COLDSNAP_IO_NO_EXTENT;
  std::string expected;
  std::string actual;

  Error(coldsnap_io_status code, std::string text) : status(code), message(std::move(text)) {}
  const char* what() const noexcept override { return message.c_str(); }
};

[[noreturn]] void fail(coldsnap_io_status status, const std::string& message);

// "what: text of the errno", with the errno kept. ENOSPC and EDQUOT count as SHORT: the disk was full.
[[noreturn]] void fail_errno(const std::string& what, int error = errno);

// An explicit direct transfer on a filesystem that takes none.
[[noreturn]] void fail_refused_direct(int error);

[[noreturn]] void fail_mismatch(uint64_t extent, const std::string& what, std::string expected, std::string actual);

std::string hex(const uint8_t* bytes, size_t length);
std::string hex(uint32_t crc);

}  // namespace coldsnap
