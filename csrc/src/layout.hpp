// From extents to slices: what is read in one piece, and where its parts go.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "coldsnap_io.h"

namespace coldsnap {

// A part of an extent inside a slice.
struct Segment {
  uint64_t file_offset;
  uint64_t address;
  uint64_t length;
  uint64_t extent;
};

// A stretch of the file, read or written as one. It may contain small gaps between its segments.
struct Slice {
  uint64_t start;
  uint64_t end;
  uint64_t first_segment;
  uint32_t segment_count;
  uint32_t head;  // bytes of `start` past a page boundary
};

// Consecutive slices that one thread works through in order. One slice, except for an extent whose SHA-256 has to be made:
// that digest cannot be made in parts.
struct Task {
  uint64_t first_slice;
  uint64_t slice_count;
};

struct Layout {
  std::vector<Segment> segments;  // ordered by slice; those of one extent in ascending order
  std::vector<Slice> slices;
  std::vector<Task> tasks;  // longest chains first, then in file order
  uint64_t bytes = 0;

  std::span<const Segment> of(const Slice& slice) const { return {segments.data() + slice.first_segment, slice.segment_count}; }
};

struct LayoutRules {
  uint64_t slice_bytes;
  uint64_t gap_bytes;  // extents no further apart than this share a slice
  bool file_order = false;  // tasks strictly in file order
};

Layout make_layout(std::span<const coldsnap_io_extent> extents, const LayoutRules& rules);

}  // namespace coldsnap
