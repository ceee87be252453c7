// What the parts of the selftest share.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "coldsnap_io.h"

extern "C" void fault_plan(const char* name, long after, long times, int error);

#define REQUIRE(condition)                                                                               \
  if (!(condition)) {                                                                                    \
    std::fprintf(stderr, "%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #condition,                 \
                 coldsnap_io_last_error()->message);                                                     \
    std::abort();                                                                                        \
  }

using Bytes = std::vector<uint8_t>;

inline std::string& directory() {
  static std::string chosen;
  return chosen;
}

inline Bytes content(size_t length, std::mt19937_64& random) {
  Bytes bytes(length);
  for (auto& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

inline int new_file(const std::string& name) {
  const std::string path = directory() + "/" + name;
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  REQUIRE(fd >= 0);
  return fd;
}

// Read-only: a file open for writing gets no lease, so it is never mapped.
inline int file_with(const Bytes& bytes, const std::string& name) {
  const int fd = new_file(name);
  REQUIRE(write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  close(fd);
  const std::string path = directory() + "/" + name;
  const int readable = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  unlink(path.c_str());
  return readable;
}

// Page images of random content, in every way, whole and broken.
void pages_come_back(std::mt19937_64& random, const std::string& name);
