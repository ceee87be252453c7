/* libcoldsnap_io: bytes between files and final addresses, on a GPU or in host memory.
 *
 * A plain C interface, versioned by COLDSNAP_IO_ABI. Every call that can fail returns a coldsnap_io_status; the text and
 * the details of the calling thread's last failure are in coldsnap_io_last_error(). Nothing here keeps a thread, an
 * io_uring or a file descriptor after it returns; the pinned ring stays until coldsnap_io_release().
 */
#ifndef COLDSNAP_IO_H
#define COLDSNAP_IO_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COLDSNAP_IO_ABI 2
#define COLDSNAP_IO_API __attribute__((visibility("default")))
#define COLDSNAP_IO_NO_EXTENT UINT64_MAX
#define COLDSNAP_IO_HOST (-1) /* cuda_device of a transfer whose addresses are host memory */

typedef enum {
  COLDSNAP_IO_OK = 0,
  COLDSNAP_IO_INVALID = 1,     /* the call contradicts itself, the file or this interface */
  COLDSNAP_IO_UNAVAILABLE = 2, /* a library, a device or a filesystem does not offer what was asked for */
  COLDSNAP_IO_SYSTEM = 3,      /* a system call failed: os_error */
  COLDSNAP_IO_SHORT = 4,       /* the file ended, or the disk was full, in the middle of a transfer */
  COLDSNAP_IO_CUDA = 5,        /* the CUDA driver failed: driver_error */
  COLDSNAP_IO_CUFILE = 6,      /* cuFile failed: driver_error */
  COLDSNAP_IO_MISMATCH = 7,    /* the bytes moved are not the bytes expected: extent, expected, actual */
  COLDSNAP_IO_MEMORY = 8       /* no memory for the ring */
} coldsnap_io_status;

typedef enum {
  COLDSNAP_IO_AUTO = 0, /* direct where the filesystem takes it and the page cache does not hold the range */
  COLDSNAP_IO_BUFFERED = 1,
  COLDSNAP_IO_DIRECT = 2,
  COLDSNAP_IO_GDS = 3
} coldsnap_io_backend;

/* How buffered ranges leave the page cache. */
typedef enum {
  COLDSNAP_IO_ACCESS_AUTO = 0,    /* the faster of read and map, measured on the first slices where both make sense */
  COLDSNAP_IO_ACCESS_READ = 1,    /* pread */
  COLDSNAP_IO_ACCESS_MAP = 2,     /* copy out of a mapping of the file */
  COLDSNAP_IO_ACCESS_REGISTER = 3 /* let the device read the mapping itself: no copy by a CPU */
} coldsnap_io_access;

typedef enum {
  COLDSNAP_IO_VERIFY_NONE = 0,
  COLDSNAP_IO_VERIFY_CRC32 = 1,
  COLDSNAP_IO_VERIFY_CRC32_SHA256 = 2
} coldsnap_io_verify;

/* Flags of a transfer. */
#define COLDSNAP_IO_DISCARD 1u       /* hydrate: read and verify only, addresses are ignored */
#define COLDSNAP_IO_FILE_SHA256 2u   /* capture: digest of the whole file, gaps counted as zeros */
#define COLDSNAP_IO_READ_BACK 4u     /* capture: compare the durable file with what was captured */
#define COLDSNAP_IO_PAD_EXTENTS 8u   /* capture: fill each extent up to 4096 bytes with zeros */
#define COLDSNAP_IO_NO_DIRECT_OPEN 16u /* auto: the caller knows a reason to stay buffered */

typedef struct {
  uint64_t file_offset;
  uint64_t address; /* final address: destination of a hydrate, source of a capture */
  uint64_t length;
  uint32_t verify;  /* coldsnap_io_verify; in a capture: which digests to make */
  uint32_t crc32;   /* hydrate: expected; capture: result */
  uint8_t sha256[32];
} coldsnap_io_extent;

typedef struct {
  uint32_t abi;         /* COLDSNAP_IO_ABI */
  uint32_t backend;     /* coldsnap_io_backend */
  uint32_t access;      /* coldsnap_io_access */
  uint32_t queue_depth; /* 1..64 */
  uint64_t chunk_bytes; /* multiple of 4096; the ring holds at most queue_depth * chunk_bytes */
  uint64_t slice_bytes; /* one read and one copy; multiple of 4096, 0: chosen, never above chunk_bytes */
  uint32_t threads;     /* 0: chosen */
  int32_t cuda_device;  /* ordinal, or COLDSNAP_IO_HOST */
  uint32_t flags;
  uint32_t reserved;    /* 0 */
} coldsnap_io_options;

typedef enum {
  COLDSNAP_IO_REASON_REQUESTED = 0,    /* the backend was asked for by name */
  COLDSNAP_IO_REASON_RESIDENT = 1,     /* the page cache holds the range */
  COLDSNAP_IO_REASON_NOT_RESIDENT = 2, /* it does not */
  COLDSNAP_IO_REASON_UNKNOWN = 3,      /* the kernel does not say: read as if it did not */
  COLDSNAP_IO_REASON_NO_DIRECT = 4,    /* no direct descriptor: refused by the filesystem or by the caller */
  COLDSNAP_IO_REASON_EDGE = 5,         /* less than a block at either end of an extent */
  COLDSNAP_IO_REASON_LAYOUT = 6        /* capture: the layout is not aligned */
} coldsnap_io_reason;

typedef struct {
  uint64_t file_offset;
  uint64_t length;
  uint32_t backend; /* buffered, direct or gds */
  uint32_t reason;  /* coldsnap_io_reason */
} coldsnap_io_range;

typedef struct {
  uint32_t abi;
  uint32_t threads;
  uint64_t bytes;             /* moved to or from final addresses */
  uint64_t buffered_bytes;    /* of them through the page cache, edges included */
  uint64_t direct_bytes;
  uint64_t edge_bytes;
  uint64_t file_bytes;        /* capture: size of the file */
  uint64_t verified_extents;
  uint64_t slices;
  uint64_t slice_bytes;
  uint64_t ring_bytes;
  uint64_t range_count;       /* ranges there were; the caller's array may hold fewer */
  uint32_t access;            /* what buffered ranges used in the end */
  int32_t direct_errno;       /* of a direct open that auto gave up, else 0 */
  uint32_t reason;            /* capture: why direct or buffered, a coldsnap_io_reason */
  uint32_t reserved;
  uint64_t initialization_ns; /* wall clock: layout, ring, threads */
  uint64_t io_ns;             /* from here sums over all threads: reading or writing the file */
  uint64_t wait_ns;           /* waiting for a stage's event */
  uint64_t checksum_ns;
  uint64_t enqueue_ns;        /* handing copies to the driver; copying, on the host */
  uint64_t synchronize_ns;    /* the last copies */
  uint64_t durability_ns;     /* wall clock from here on; capture: fdatasync */
  uint64_t read_back_ns;      /* capture: comparing the durable file */
  uint64_t total_ns;
  uint8_t file_sha256[32];
} coldsnap_io_result;

typedef struct {
  uint32_t status;
  int32_t os_error;
  int32_t driver_error;
  uint32_t reserved;
  uint64_t extent; /* index of the extent concerned, or COLDSNAP_IO_NO_EXTENT */
  char message[512];
  char expected[80];
  char actual[80];
} coldsnap_io_error;

typedef struct {
  uint64_t ring_bytes;       /* held now */
  uint64_t registered_bytes; /* of them page-locked for the driver */
} coldsnap_io_statistics;

typedef struct {
  uint64_t file_offset; /* of its first byte */
  uint64_t pattern;     /* index */
} coldsnap_io_match;

typedef struct {
  uint64_t opaque[13];
} coldsnap_io_sha256_stream;

typedef struct {
  coldsnap_io_sha256_stream* stream;
  const void* data;
  uint64_t length;
} coldsnap_io_sha256_part;

/* Page images: the pages of a process image in LZ4 blocks (docs/format/pageimage.md). */
#define COLDSNAP_IO_SEQUENTIAL 1u /* unpack: write one block after the other, zeros too, as a pipe needs it */

typedef struct {
  uint64_t offset;
  uint64_t length;
} coldsnap_io_span;

typedef struct {
  uint32_t length; /* of the payload. 0: the block is all zeros; that of the block itself: stored; else LZ4 */
  uint32_t crc32;  /* of the payload */
} coldsnap_io_block;

typedef struct {
  uint32_t abi;            /* COLDSNAP_IO_ABI */
  uint32_t block_bytes;    /* multiple of 4096, at most 4 MiB */
  uint64_t raw_bytes;      /* of all pages together */
  uint64_t payload_offset; /* of the first payload in the file; multiple of 4096 */
  uint32_t alignment;      /* payloads start at multiples of it: 4096, or 1 */
  uint32_t acceleration;   /* pack: 1 compresses best, more is faster */
  uint32_t backend;        /* unpack: auto, buffered or direct */
  uint32_t workers;        /* threads that compress or decompress; others read and write */
  uint32_t flags;
  uint32_t reserved;       /* 0 */
} coldsnap_io_image;

typedef struct {
  uint32_t workers;
  uint32_t reserved;
  uint64_t raw_bytes;
  uint64_t zero_bytes;    /* of them in blocks without payload */
  uint64_t payload_bytes; /* exact lengths */
  uint64_t end;           /* of the last payload in the file, with its padding */
  uint64_t buffered_bytes;
  uint64_t direct_bytes;
  uint64_t io_ns;         /* sums over threads, as the next two */
  uint64_t codec_ns;
  uint64_t write_ns;
  uint64_t total_ns;
} coldsnap_io_image_result;

COLDSNAP_IO_API uint32_t coldsnap_io_abi_version(void);

/* The calling thread's last failure; valid until its next call. */
COLDSNAP_IO_API const coldsnap_io_error* coldsnap_io_last_error(void);

/* Load the CUDA driver or cuFile from this path instead of the system's: for tests, and for unusual installations.
 * INVALID once one is loaded. NULL loads the system's now. */
COLDSNAP_IO_API int coldsnap_io_load_cuda(const char* path);
COLDSNAP_IO_API int coldsnap_io_load_cufile(const char* path);

/* 0 when transfers of this kind can be tried here; an open file, and for gds a device, is needed to know more. */
COLDSNAP_IO_API int coldsnap_io_hydrate_available(uint32_t backend, int32_t cuda_device);
COLDSNAP_IO_API int coldsnap_io_capture_available(uint32_t backend, int32_t cuda_device);

/* 0 when cuFile really moves bytes of this file to this device: one block is read and compared. */
COLDSNAP_IO_API int coldsnap_io_probe_gds(int fd, int32_t cuda_device);

/* Bring extents of an open file to their addresses. 0 only after every byte has arrived and every digest was right;
 * otherwise the destination must be taken for garbage. */
COLDSNAP_IO_API int coldsnap_io_hydrate(int fd, const coldsnap_io_extent* extents, uint64_t count,
                                        const coldsnap_io_options* options, coldsnap_io_result* result,
                                        coldsnap_io_range* ranges, uint64_t range_capacity);

/* Write extents, in file order and without overlap, to an empty file opened for reading and writing, and make it durable.
 * Names are the caller's business: it gives the file its own only after 0. */
COLDSNAP_IO_API int coldsnap_io_capture(int fd, coldsnap_io_extent* extents, uint64_t count,
                                        const coldsnap_io_options* options, coldsnap_io_result* result);

/* For each page from the start of a file: 1 when it is all zeros, else 0. */
COLDSNAP_IO_API int coldsnap_io_zero_pages(int fd, uint8_t* zero, uint64_t pages);

/* Compress the spans of one file, one after the other, into the payloads of another; blocks are the index. */
COLDSNAP_IO_API int coldsnap_io_pack_pages(int in, const coldsnap_io_span* spans, uint64_t span_count, int out,
                                           const coldsnap_io_image* image, coldsnap_io_block* blocks, uint64_t block_count,
                                           coldsnap_io_image_result* result);

/* Bring the pages back: to the start of a file without content, or with SEQUENTIAL to a pipe. Every payload is compared with its
 * checksum first; MISMATCH names the block as extent. */
COLDSNAP_IO_API int coldsnap_io_unpack_pages(int in, const coldsnap_io_block* blocks, uint64_t block_count, int out,
                                             const coldsnap_io_image* image, coldsnap_io_image_result* result);

/* For each block of block_bytes from offset: how many of its pages the page cache holds. */
COLDSNAP_IO_API int coldsnap_io_residency(int fd, uint64_t offset, uint64_t length, uint64_t block_bytes,
                                          uint64_t* resident_pages, uint64_t block_count);

/* Digests of memory, at the speed of the transfers. */
COLDSNAP_IO_API uint32_t coldsnap_io_crc32(uint32_t crc, const void* data, uint64_t length);
COLDSNAP_IO_API uint32_t coldsnap_io_crc32_combine(uint32_t first, uint32_t second, uint64_t second_length);
COLDSNAP_IO_API uint32_t coldsnap_io_crc32_copy(uint32_t crc, void* destination, const void* source, uint64_t length);
COLDSNAP_IO_API void coldsnap_io_sha256(const void* data, uint64_t length, uint8_t digest[32]);

/* SHA-256 of several streams at once: one stream cannot keep a core's units busy, two can. A stream is plain memory of the
 * caller's, used by one thread at a time. In one update every stream stands once. */
COLDSNAP_IO_API void coldsnap_io_sha256_begin(coldsnap_io_sha256_stream* stream);
COLDSNAP_IO_API void coldsnap_io_sha256_update(const coldsnap_io_sha256_part* parts, uint64_t count);
COLDSNAP_IO_API void coldsnap_io_sha256_end(coldsnap_io_sha256_stream* stream, uint8_t digest[32]);

/* How many streams a core works through at once; 1: as fast as others, 0: by portable code, which is slower. */
COLDSNAP_IO_API uint32_t coldsnap_io_sha256_lanes(void);
/* For tests and measurements: the whole process takes no more than so many. */
COLDSNAP_IO_API void coldsnap_io_sha256_limit(uint32_t lanes);

/* Find every place in [offset, offset + length) of a file where one of `count` (1..1024) different patterns begins, at any byte;
 * each has pattern_bytes (64..4096) bytes, one after the other. A pattern may reach beyond the range, not beyond the file, so that
 * ranges beside each other find everything once. The first `capacity` matches are stored, in file order; *found counts all. */
COLDSNAP_IO_API int coldsnap_io_search(int fd, uint64_t offset, uint64_t length, const void* patterns, uint64_t count,
                                       uint64_t pattern_bytes, coldsnap_io_match* matches, uint64_t capacity,
                                       uint64_t* found);

/* Copy between host addresses with as many threads; what a transfer into host memory is measured against. */
COLDSNAP_IO_API int coldsnap_io_memcpy(void* destination, const void* source, uint64_t length, uint32_t threads);

COLDSNAP_IO_API void coldsnap_io_read_statistics(coldsnap_io_statistics* statistics);

/* Give the ring back: before a process is frozen, its page-locked memory has to go. */
COLDSNAP_IO_API int coldsnap_io_release(void);

#ifdef __cplusplus
}
#endif
#endif
