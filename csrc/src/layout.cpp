#include "layout.hpp"

#include <algorithm>
#include <numeric>

#include "file.hpp"

namespace coldsnap {
namespace {

constexpr uint32_t kSegmentsPerSlice = 512;  // half of IOV_MAX: gaps take a part each, too

class Builder {
 public:
  Builder(const LayoutRules& rules, Layout& layout) : rules_(rules), layout_(layout) {}

  void add(const coldsnap_io_extent& extent, uint64_t index) {
    const bool chained = extent.verify == COLDSNAP_IO_VERIFY_CRC32_SHA256 && !fits(extent);
    if (chained) close();
    const uint64_t first_slice = layout_.slices.size();
    for (uint64_t done = 0; done < extent.length;) {
      Slice& slice = slice_for(extent.file_offset + done);
      const uint64_t length = std::min(extent.length - done, limit_ - (extent.file_offset + done));
      layout_.segments.push_back({extent.file_offset + done, extent.address + done, length, index});
      slice.segment_count++;
      slice.end = std::max(slice.end, extent.file_offset + done + length);
      done += length;
    }
    if (chained) {
      layout_.tasks.push_back({first_slice, layout_.slices.size() - first_slice});
      close();
    }
  }

  // Slices outside of chains are tasks of their own.
  void finish() {
    std::vector<Task> tasks;
    uint64_t next = 0;
    for (const Task& chain : layout_.tasks) {
      for (; next < chain.first_slice; ++next) tasks.push_back({next, 1});
      tasks.push_back(chain);
      next += chain.slice_count;
    }
    for (; next < layout_.slices.size(); ++next) tasks.push_back({next, 1});
    if (!rules_.file_order)
      std::ranges::stable_sort(tasks, [](const Task& a, const Task& b) { return a.slice_count > b.slice_count; });
    layout_.tasks = std::move(tasks);
  }

 private:
  bool joins(uint64_t offset) const {
    if (!open_) return false;
    const Slice& slice = layout_.slices.back();
    return offset >= slice.start && offset <= slice.end + rules_.gap_bytes && offset < limit_ &&
           slice.segment_count < kSegmentsPerSlice;
  }

  bool fits(const coldsnap_io_extent& extent) const {
    const uint64_t limit = joins(extent.file_offset) ? limit_ : limit_after(extent.file_offset);
    return extent.file_offset + extent.length <= limit;
  }

  // Slices are cut at multiples of their size: the kernel maps and reads a file fastest in whole huge pages.
  uint64_t limit_after(uint64_t offset) const { return (offset / rules_.slice_bytes + 1) * rules_.slice_bytes; }

  Slice& slice_for(uint64_t offset) {
    if (!joins(offset)) {
      const auto head = static_cast<uint32_t>(offset - round_down(offset));
      layout_.slices.push_back({offset, offset, layout_.segments.size(), 0, head});
      limit_ = limit_after(offset);
      open_ = true;
    }
    return layout_.slices.back();
  }

  void close() { open_ = false; }

  const LayoutRules& rules_;
  Layout& layout_;
  uint64_t limit_ = 0;
  bool open_ = false;
};

}  // namespace

Layout make_layout(std::span<const coldsnap_io_extent> extents, const LayoutRules& rules) {
  std::vector<uint64_t> order(extents.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](uint64_t i) { return extents[i].file_offset; });
  Layout layout;
  Builder builder(rules, layout);
  for (const uint64_t index : order) {
    layout.bytes += extents[index].length;
    builder.add(extents[index], index);
  }
  builder.finish();
  return layout;
}

}  // namespace coldsnap
