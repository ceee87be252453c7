// What the threads of one hydrate share, and the loop that each of them runs.
#pragma once

#include <atomic>

#include "digests.hpp"
#include "layout.hpp"
#include "source.hpp"
#include "workers.hpp"

namespace coldsnap {

struct Hydration {
  const coldsnap_io_options& options;
  const Layout& layout;
  Source& source;
  Digests& digests;
  FirstFailure failure;
  std::atomic<uint64_t> next_task = 0;

  // Call `slice` for every slice of the tasks this thread gets hold of.
  template <typename Body>
  void for_each_slice(Body&& slice) {
    while (!failure.stop()) {
      const uint64_t index = next_task.fetch_add(1, std::memory_order_relaxed);
      if (index >= layout.tasks.size()) return;
      const Task& task = layout.tasks[index];
      for (uint64_t i = 0; i < task.slice_count && !failure.stop(); ++i) slice(layout.slices[task.first_slice + i]);
    }
  }
};

// How many threads, how large a slice and how many stages for each thread: within queue_depth * chunk_bytes.
struct Shape {
  unsigned threads;
  uint64_t slice_bytes;
  unsigned stages;  // of each thread, a slice each: a slice keeps its place in the page and ends with it
  uint64_t ring_bytes() const;
};

// Into host memory or nowhere: no ring, at most one scratch buffer a thread.
void hydrate_host(Hydration& hydration, unsigned threads, uint64_t slice_bytes, Spent& spent);
// Through the page-locked ring.
void hydrate_device(Hydration& hydration, const Shape& shape, Spent& spent);
// By cuFile, straight from the disk.
void hydrate_gds(Hydration& hydration, unsigned threads, Spent& spent);

}  // namespace coldsnap
