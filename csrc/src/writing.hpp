// The threads of a capture: from memory through the ring into the file, summed on the way.
#pragma once

#include <atomic>

#include "digests.hpp"
#include "hydration.hpp"
#include "turnstile.hpp"

namespace coldsnap {

struct Writing {
  const coldsnap_io_options& options;
  const Layout& layout;
  Digests& digests;
  int fd;
  int direct_fd;     // -1: buffered
  Turnstile* whole;  // null: no digest of the file
  FirstFailure failure;
  std::atomic<uint64_t> next_task = 0;
};

void write_all(Writing& writing, const Shape& shape, coldsnap_io_result& result);

}  // namespace coldsnap
