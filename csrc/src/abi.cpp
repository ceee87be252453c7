#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <thread>
#include <type_traits>

#include "capture.hpp"
#include "checksum.hpp"
#include "coldsnap_io.h"
#include "cuda.hpp"
#include "error.hpp"
#include "file.hpp"
#include "gds.hpp"
#include "hydrate.hpp"
#include "page_image.hpp"
#include "ring.hpp"
#include "search.hpp"
#include "workers.hpp"

namespace {

using namespace coldsnap;

thread_local coldsnap_io_error last_error;

template <size_t kSize>
void copy_text(char (&to)[kSize], const std::string& from) {
  const size_t length = std::min(from.size(), kSize - 1);
  std::memcpy(to, from.data(), length);
  to[length] = 0;
}

int remember(const Error& failure) {
  last_error.status = failure.status;
  last_error.os_error = failure.os_error;
  last_error.driver_error = failure.driver_error;
  last_error.extent = failure.extent;
  copy_text(last_error.message, failure.message);
  copy_text(last_error.expected, failure.expected);
  copy_text(last_error.actual, failure.actual);
  return failure.status;
}

// No exception may cross the C interface.
template <typename Body>
int guarded(Body&& body) noexcept {
  last_error = {};
  last_error.extent = COLDSNAP_IO_NO_EXTENT;
  try {
    body();
    return COLDSNAP_IO_OK;
  } catch (const Error& failure) {
    return remember(failure);
  } catch (const std::bad_alloc&) {
    return remember(Error(COLDSNAP_IO_MEMORY, "out of memory"));
  } catch (const std::exception& failure) {
    return remember(Error(COLDSNAP_IO_SYSTEM, failure.what()));
  }
}

void check_backend(uint32_t backend, int32_t cuda_device, uint32_t highest) {
  if (backend > highest) fail(COLDSNAP_IO_INVALID, "no such backend: " + std::to_string(backend));
  if (cuda_device != COLDSNAP_IO_HOST) const cuda::Session session(cuda_device);
}

}  // namespace

uint32_t coldsnap_io_abi_version(void) { return COLDSNAP_IO_ABI; }

const coldsnap_io_error* coldsnap_io_last_error(void) { return &last_error; }

int coldsnap_io_load_cuda(const char* path) {
  return guarded([&] { cuda::load(path); });
}

int coldsnap_io_load_cufile(const char* path) {
  return guarded([&] { gds::load(path); });
}

int coldsnap_io_hydrate_available(uint32_t backend, int32_t cuda_device) {
  return guarded([&] {
    if (backend == COLDSNAP_IO_GDS && cuda_device == COLDSNAP_IO_HOST) fail(COLDSNAP_IO_UNAVAILABLE, "gds needs a device");
    check_backend(backend, cuda_device, COLDSNAP_IO_GDS);
    if (backend == COLDSNAP_IO_GDS) gds::check_available();
  });
}

int coldsnap_io_capture_available(uint32_t backend, int32_t cuda_device) {
  return guarded([&] { check_backend(backend, cuda_device, COLDSNAP_IO_DIRECT); });
}

int coldsnap_io_probe_gds(int fd, int32_t cuda_device) {
  return guarded([&] { gds::probe(fd, cuda_device); });
}

int coldsnap_io_hydrate(int fd, const coldsnap_io_extent* extents, uint64_t count, const coldsnap_io_options* options,
                        coldsnap_io_result* result, coldsnap_io_range* ranges, uint64_t range_capacity) {
  return guarded([&] {
    *result = {};
    result->abi = COLDSNAP_IO_ABI;
    const auto went = hydrate(fd, {extents, count}, *options, *result);
    std::copy_n(went.begin(), std::min<uint64_t>(went.size(), range_capacity), ranges);
  });
}

int coldsnap_io_capture(int fd, coldsnap_io_extent* extents, uint64_t count, const coldsnap_io_options* options,
                        coldsnap_io_result* result) {
  return guarded([&] {
    *result = {};
    result->abi = COLDSNAP_IO_ABI;
    capture(fd, {extents, count}, *options, *result);
  });
}

int coldsnap_io_zero_pages(int fd, uint8_t* zero, uint64_t pages) {
  return guarded([&] { find_zero_pages(fd, {zero, pages}); });
}

int coldsnap_io_pack_pages(int in, const coldsnap_io_span* spans, uint64_t span_count, int out, const coldsnap_io_image* image,
                           coldsnap_io_block* blocks, uint64_t block_count, coldsnap_io_image_result* result) {
  return guarded([&] {
    *result = {};
    pack_pages(in, {spans, span_count}, out, *image, {blocks, block_count}, *result);
  });
}

int coldsnap_io_unpack_pages(int in, const coldsnap_io_block* blocks, uint64_t block_count, int out,
                             const coldsnap_io_image* image, coldsnap_io_image_result* result) {
  return guarded([&] {
    *result = {};
    unpack_pages(in, {blocks, block_count}, out, *image, *result);
  });
}

int coldsnap_io_residency(int fd, uint64_t offset, uint64_t length, uint64_t block_bytes, uint64_t* resident,
                          uint64_t block_count) {
  return guarded([&] {
    if (!block_bytes || (length + block_bytes - 1) / block_bytes != block_count)
      fail(COLDSNAP_IO_INVALID, "block_count does not cover the range in blocks of block_bytes");
    for (uint64_t i = 0; i < block_count; ++i) {
      const uint64_t start = i * block_bytes;
      const auto pages = resident_pages(fd, offset + start, std::min(block_bytes, length - start));
      if (!pages) fail(COLDSNAP_IO_UNAVAILABLE, "the kernel does not say what the page cache holds of this file");
      resident[i] = *pages;
    }
  });
}

uint32_t coldsnap_io_crc32(uint32_t crc, const void* data, uint64_t length) { return crc32(crc, data, length); }

uint32_t coldsnap_io_crc32_combine(uint32_t first, uint32_t second, uint64_t second_length) {
  return crc32_combine(first, second, second_length);
}

void coldsnap_io_sha256(const void* data, uint64_t length, uint8_t digest[32]) {
  Sha256 sum;
  sum.update(data, length);
  std::ranges::copy(sum.finish(), digest);
}

uint32_t coldsnap_io_crc32_copy(uint32_t crc, void* destination, const void* source, uint64_t length) {
  return crc32_copy(crc, destination, source, length);
}

static_assert(sizeof(Sha256) == sizeof(coldsnap_io_sha256_stream) && std::is_trivially_copyable_v<Sha256>);

void coldsnap_io_sha256_begin(coldsnap_io_sha256_stream* stream) {
  *stream = std::bit_cast<coldsnap_io_sha256_stream>(Sha256());
}

void coldsnap_io_sha256_update(const coldsnap_io_sha256_part* parts, uint64_t count) {
  constexpr uint64_t kAtOnce = 16;
  Sha256 streams[kAtOnce];
  Sha256::Part told[kAtOnce];
  for (; count; parts += std::min(count, kAtOnce), count -= std::min(count, kAtOnce)) {
    const uint64_t some = std::min(count, kAtOnce);
    for (uint64_t i = 0; i < some; ++i) {
      std::memcpy(static_cast<void*>(&streams[i]), parts[i].stream, sizeof(Sha256));
      told[i] = {&streams[i], static_cast<const uint8_t*>(parts[i].data), parts[i].length};
    }
    Sha256::update_all({told, some});
    for (uint64_t i = 0; i < some; ++i) std::memcpy(parts[i].stream, &streams[i], sizeof(Sha256));
  }
}

void coldsnap_io_sha256_end(coldsnap_io_sha256_stream* stream, uint8_t digest[32]) {
  std::ranges::copy(std::bit_cast<Sha256>(*stream).finish(), digest);
}

uint32_t coldsnap_io_sha256_lanes(void) { return sha256_lanes(); }

void coldsnap_io_sha256_limit(uint32_t lanes) { limit_sha256_lanes(lanes); }

int coldsnap_io_search(int fd, uint64_t offset, uint64_t length, const void* patterns, uint64_t count, uint64_t pattern_bytes,
                       coldsnap_io_match* matches, uint64_t capacity, uint64_t* found) {
  return guarded([&] {
    const auto all = search(fd, offset, length, static_cast<const uint8_t*>(patterns), count, pattern_bytes);
    std::copy_n(all.begin(), std::min<uint64_t>(all.size(), capacity), matches);
    *found = all.size();
  });
}

int coldsnap_io_memcpy(void* destination, const void* source, uint64_t length, uint32_t threads) {
  return guarded([&] {
    FirstFailure failure;
    const uint64_t share = round_up((length + threads - 1) / threads);
    run_workers(threads, failure, [&](unsigned index) {
      const uint64_t start = std::min(length, index * share);
      std::memcpy(static_cast<char*>(destination) + start, static_cast<const char*>(source) + start,
                  std::min(share, length - start));
    });
  });
}

void coldsnap_io_read_statistics(coldsnap_io_statistics* statistics) {
  Ring::statistics(&statistics->ring_bytes, &statistics->registered_bytes);
}

int coldsnap_io_release(void) {
  return guarded([] {
    Ring::release();
    gds::close_driver();
  });
}
