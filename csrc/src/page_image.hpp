// Page images: the pages of a process image in LZ4 blocks (docs/format/pageimage.md). Native side: the blocks, in and out; header
// and index are the caller's.
#pragma once

#include <cstdint>
#include <span>

#include "coldsnap_io.h"

namespace coldsnap {

// One byte for each page from the start of the file: 1 when the page is all zeros.
void find_zero_pages(int fd, std::span<uint8_t> zero);

void pack_pages(int in, std::span<const coldsnap_io_span> spans, int out, const coldsnap_io_image& image,
                std::span<coldsnap_io_block> blocks, coldsnap_io_image_result& result);

void unpack_pages(int in, std::span<const coldsnap_io_block> blocks, int out, const coldsnap_io_image& image,
                  coldsnap_io_image_result& result);

}  // namespace coldsnap
