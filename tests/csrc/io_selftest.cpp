// The library's own test, for the sanitizers: random layouts, every way, failures in the middle, several threads at once.
//     io_selftest <libcuda_shim.so> <directory> [rounds]
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "selftest.hpp"

namespace {

void (*shim_fail)(const char*, long, int);
void (*shim_counts)(long*);

struct Way {
  uint32_t backend, access;
  int32_t device;
};
constexpr Way kWays[] = {
    {COLDSNAP_IO_AUTO, COLDSNAP_IO_ACCESS_AUTO, -1},     {COLDSNAP_IO_BUFFERED, COLDSNAP_IO_ACCESS_READ, -1},
    {COLDSNAP_IO_BUFFERED, COLDSNAP_IO_ACCESS_MAP, -1},  {COLDSNAP_IO_DIRECT, COLDSNAP_IO_ACCESS_AUTO, -1},
    {COLDSNAP_IO_AUTO, COLDSNAP_IO_ACCESS_AUTO, 0},      {COLDSNAP_IO_BUFFERED, COLDSNAP_IO_ACCESS_READ, 0},
    {COLDSNAP_IO_BUFFERED, COLDSNAP_IO_ACCESS_MAP, 0},   {COLDSNAP_IO_BUFFERED, COLDSNAP_IO_ACCESS_REGISTER, 1},
    {COLDSNAP_IO_DIRECT, COLDSNAP_IO_ACCESS_AUTO, 1},
};

coldsnap_io_options options(const Way& way, std::mt19937_64& random) {
  coldsnap_io_options chosen{};
  chosen.abi = COLDSNAP_IO_ABI;
  chosen.backend = way.backend;
  chosen.access = way.access;
  chosen.cuda_device = way.device;
  chosen.queue_depth = 1 + random() % 8;
  chosen.chunk_bytes = 4096 << (random() % 8);
  chosen.threads = random() % 5;
  return chosen;
}

struct Job {
  std::vector<coldsnap_io_extent> extents;
  Bytes target, expected;
};

Job random_job(const Bytes& bytes, std::mt19937_64& random) {
  Job job;
  const size_t count = 1 + random() % 30;
  std::vector<size_t> gaps(count);
  size_t total = 64;
  for (size_t i = 0; i < count; ++i) {
    coldsnap_io_extent extent{};
    extent.file_offset = random() % bytes.size();
    if (random() % 3 == 0) extent.file_offset &= ~uint64_t{4095};
    const uint64_t room = bytes.size() - extent.file_offset;
    extent.length = random() % 2 ? random() % (room + 1) : std::min<uint64_t>(room, random() % 100);
    extent.verify = random() % 3;
    extent.crc32 = coldsnap_io_crc32(0, bytes.data() + extent.file_offset, extent.length);
    coldsnap_io_sha256(bytes.data() + extent.file_offset, extent.length, extent.sha256);
    gaps[i] = random() % 50;
    total += extent.length + gaps[i];
    job.extents.push_back(extent);
  }
  job.target.assign(total, 0xa5);
  job.expected = job.target;
  size_t at = 0;
  for (size_t i = 0; i < count; ++i) {
    at += gaps[i];
    auto& extent = job.extents[i];
    extent.address = reinterpret_cast<uint64_t>(job.target.data() + at);
    std::memcpy(job.expected.data() + at, bytes.data() + extent.file_offset, extent.length);
    at += extent.length;
  }
  return job;
}

int hydrate(int fd, Job& job, const coldsnap_io_options& chosen) {
  coldsnap_io_result result;
  coldsnap_io_range ranges[4];
  return coldsnap_io_hydrate(fd, job.extents.data(), job.extents.size(), &chosen, &result, ranges, 4);
}

void every_way_delivers(std::mt19937_64& random, const std::string& name) {
  const Bytes bytes = content(1 + random() % 700'000, random);
  const int fd = file_with(bytes, name);
  for (const Way& way : kWays) {
    Job job = random_job(bytes, random);
    REQUIRE(hydrate(fd, job, options(way, random)) == COLDSNAP_IO_OK);
    REQUIRE(job.target == job.expected);
  }
  close(fd);
}

void failures_are_named(std::mt19937_64& random) {
  const Bytes bytes = content(600'000, random);
  const int fd = file_with(bytes, "failing");
  for (const Way& way : kWays) {
    Job job = random_job(bytes, random);
    coldsnap_io_extent whole{};
    whole.length = bytes.size();
    Bytes place(bytes.size());
    whole.address = reinterpret_cast<uint64_t>(place.data());
    job.extents.push_back(whole);
    coldsnap_io_options chosen = options(way, random);
    chosen.chunk_bytes = 16384;
    fault_plan(way.access == COLDSNAP_IO_ACCESS_MAP ? "populate" : "preadv", static_cast<long>(random() % 10), 1, EIO);
    const int by_disk = hydrate(fd, job, chosen);
    REQUIRE(by_disk == COLDSNAP_IO_OK || by_disk == COLDSNAP_IO_SYSTEM);
    fault_plan("preadv", -1, 0, 0);
    fault_plan("populate", -1, 0, 0);
    if (way.device >= 0) {
      for (const char* call : {"cuMemcpyHtoDAsync", "cuEventRecord", "cuEventSynchronize", "cuStreamCreate"}) {
        shim_fail(call, way.access == COLDSNAP_IO_ACCESS_REGISTER ? 0 : 1, 700);
        const int by_device = hydrate(fd, job, chosen);
        REQUIRE(by_device == COLDSNAP_IO_OK || by_device == COLDSNAP_IO_CUDA);
        shim_fail("", -1, 0);
      }
    }
    REQUIRE(hydrate(fd, job, chosen) == COLDSNAP_IO_OK);
    REQUIRE(place == bytes);
    job.extents.back().verify = COLDSNAP_IO_VERIFY_CRC32;
    REQUIRE(hydrate(fd, job, chosen) == COLDSNAP_IO_MISMATCH);
    REQUIRE(coldsnap_io_last_error()->extent == job.extents.size() - 1);
  }
  close(fd);
}

void captures_come_back(std::mt19937_64& random) {
  for (const int32_t device : {-1, 0}) {
    for (const uint32_t backend : {COLDSNAP_IO_AUTO, COLDSNAP_IO_BUFFERED, COLDSNAP_IO_DIRECT}) {
      Bytes bytes = content(300'000 + random() % 100'000, random);
      std::vector<coldsnap_io_extent> extents;
      uint64_t offset = 0;
      for (size_t at = 0; at < bytes.size();) {
        coldsnap_io_extent extent{};
        extent.length = std::min<uint64_t>(bytes.size() - at, random() % 60'000);
        extent.file_offset = offset;
        extent.address = reinterpret_cast<uint64_t>(bytes.data() + at);
        extent.verify = random() % 3;
        offset += (extent.length + 4095) / 4096 * 4096 + (random() % 2 ? 0 : 81'920);
        at += extent.length;
        extents.push_back(extent);
      }
      const int fd = new_file("capture");
      coldsnap_io_options chosen = options({backend, COLDSNAP_IO_ACCESS_AUTO, device}, random);
      chosen.flags = COLDSNAP_IO_PAD_EXTENTS | COLDSNAP_IO_READ_BACK | (random() % 2 ? COLDSNAP_IO_FILE_SHA256 : 0);
      coldsnap_io_result result;
      REQUIRE(coldsnap_io_capture(fd, extents.data(), extents.size(), &chosen, &result) == COLDSNAP_IO_OK);
      Bytes back(bytes.size());
      for (auto& extent : extents) extent.address += reinterpret_cast<uint64_t>(back.data()) - reinterpret_cast<uint64_t>(bytes.data());
      chosen.flags = 0;
      Job job{extents, {}, {}};
      REQUIRE(hydrate(fd, job, chosen) == COLDSNAP_IO_OK);
      REQUIRE(back == bytes);
      ftruncate(fd, 0) ? std::abort() : void();
      for (auto& extent : extents) extent.address -= reinterpret_cast<uint64_t>(back.data()) - reinterpret_cast<uint64_t>(bytes.data());
      chosen.flags = COLDSNAP_IO_PAD_EXTENTS | COLDSNAP_IO_FILE_SHA256;
      fault_plan("pwritev", static_cast<long>(random() % 4), 1, ENOSPC);
      const int full = coldsnap_io_capture(fd, extents.data(), extents.size(), &chosen, &result);
      REQUIRE(full == COLDSNAP_IO_OK || full == COLDSNAP_IO_SHORT);
      fault_plan("pwritev", -1, 0, 0);
      close(fd);
    }
  }
}

void streams_side_by_side_have_their_own_digests(std::mt19937_64& random) {
  coldsnap_io_sha256_limit(random() % 4);
  std::vector<coldsnap_io_sha256_stream> streams(1 + random() % 20);
  std::vector<Bytes> contents(streams.size());
  for (auto& stream : streams) coldsnap_io_sha256_begin(&stream);
  for (int turn = 0; turn < 10; ++turn) {
    std::vector<Bytes> pieces;
    std::vector<coldsnap_io_sha256_part> parts;
    for (size_t i = 0; i < streams.size(); ++i) {
      pieces.push_back(content(random() % 3 ? random() % 200 : random() % 5000, random));
      contents[i].insert(contents[i].end(), pieces[i].begin(), pieces[i].end());
    }
    for (size_t i = 0; i < streams.size(); ++i) parts.push_back({&streams[i], pieces[i].data(), pieces[i].size()});
    coldsnap_io_sha256_update(parts.data(), parts.size());
  }
  coldsnap_io_sha256_limit(UINT32_MAX);
  for (size_t i = 0; i < streams.size(); ++i) {
    uint8_t digest[32], expected[32];
    coldsnap_io_sha256_end(&streams[i], digest);
    coldsnap_io_sha256(contents[i].data(), contents[i].size(), expected);
    REQUIRE(!std::memcmp(digest, expected, 32));
  }
}

void every_pattern_is_found(std::mt19937_64& random) {
  const uint64_t size = 64 + random() % 40;
  Bytes patterns(size * (1 + random() % 5)), bytes = content(random() % 400'000, random);
  for (auto& byte : patterns) byte = static_cast<uint8_t>(random() % 2);
  const uint64_t count = patterns.size() / size;
  for (int turn = 0; turn < 20 && bytes.size() > size; ++turn)
    std::memcpy(bytes.data() + random() % (bytes.size() - size + 1), patterns.data() + random() % count * size, size);
  std::vector<coldsnap_io_match> expected, found(64), part(64);
  for (uint64_t at = 0; at + size <= bytes.size(); ++at)
    for (uint64_t i = 0; i < count; ++i)
      if (!std::memcmp(bytes.data() + at, patterns.data() + i * size, size)) expected.push_back({at, i});
  const int fd = file_with(bytes, "searched");
  const uint64_t half = bytes.size() ? random() % bytes.size() : 0;
  uint64_t first = 0, second = 0;
  REQUIRE(coldsnap_io_search(fd, 0, half, patterns.data(), count, size, found.data(), 64, &first) == COLDSNAP_IO_OK);
  REQUIRE(coldsnap_io_search(fd, half, bytes.size() - half, patterns.data(), count, size, part.data(), 64, &second) == COLDSNAP_IO_OK);
  REQUIRE(first + second == expected.size());
  std::copy_n(part.begin(), second, found.begin() + static_cast<long>(first));
  for (size_t i = 0; i < expected.size(); ++i)
    REQUIRE(found[i].file_offset == expected[i].file_offset && found[i].pattern == expected[i].pattern);
  close(fd);
}

void nothing_is_left() {
  long counts[8];
  coldsnap_io_release();
  shim_counts(counts);
  for (int held : {0, 1, 2, 3, 4}) REQUIRE(counts[held] == 0);
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) return 2;
  directory() = arguments[2];
  const int rounds = count > 3 ? std::atoi(arguments[3]) : 20;
  REQUIRE(coldsnap_io_load_cuda(arguments[1]) == COLDSNAP_IO_OK);
  void* shim = dlopen(arguments[1], RTLD_NOW);
  shim_fail = reinterpret_cast<decltype(shim_fail)>(dlsym(shim, "shim_fail"));
  shim_counts = reinterpret_cast<decltype(shim_counts)>(dlsym(shim, "shim_counts"));
  std::mt19937_64 random(7);
  for (int round = 0; round < rounds; ++round) {
    every_way_delivers(random, "one");
    failures_are_named(random);
    captures_come_back(random);
    every_pattern_is_found(random);
    streams_side_by_side_have_their_own_digests(random);
    pages_come_back(random, "pages");
  }
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 3; ++seed)
    threads.emplace_back([seed] {
      std::mt19937_64 mine(seed);
      for (int turn = 0; turn < 5; ++turn) every_way_delivers(mine, "thread" + std::to_string(seed));
    });
  for (auto& thread : threads) thread.join();
  nothing_is_left();
  std::printf("io_selftest: %d rounds passed\n", rounds);
}
