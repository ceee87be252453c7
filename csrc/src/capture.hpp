// From memory to a new, durable file.
#pragma once

#include <span>

#include "coldsnap_io.h"

namespace coldsnap {

// Write the extents to an empty file and make it durable; their digests are filled in. After a failure the file is garbage.
void capture(int fd, std::span<coldsnap_io_extent> extents, const coldsnap_io_options& options, coldsnap_io_result& result);

}  // namespace coldsnap
