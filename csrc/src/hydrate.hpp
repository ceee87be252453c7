// From an open file to final addresses.
#pragma once

#include <span>
#include <vector>

#include "coldsnap_io.h"

namespace coldsnap {

// Options that contradict themselves are refused before anything is touched.
void check_options(const coldsnap_io_options& options);

// Returns the ranges and how each went. Fills `result`; throws Error.
std::vector<coldsnap_io_range> hydrate(int fd, std::span<const coldsnap_io_extent> extents, const coldsnap_io_options& options,
                                       coldsnap_io_result& result);

}  // namespace coldsnap
