// Finding pieces of memory in files: which of many patterns lie where, at any byte.
#pragma once

#include <cstdint>
#include <vector>

#include "coldsnap_io.h"

namespace coldsnap {

// Every place in [offset, offset + length) of the file where one of `count` patterns, each pattern_bytes long, begins; in file
// order. A pattern may reach beyond the range, never beyond the file.
std::vector<coldsnap_io_match> search(int fd, uint64_t offset, uint64_t length, const uint8_t* patterns, uint64_t count,
                                      uint64_t pattern_bytes);

}  // namespace coldsnap
