// cuFile, found at run time: from the disk into device memory, past the processor.
#pragma once

#include <cstdint>

namespace coldsnap::gds {

void load(const char* path);

// Throws UNAVAILABLE unless cuFile can be loaded and its kernel module is there.
void check_available();

// Throws unless one block of this file arrives in this device's memory as it is in the file. A library that is present
// proves nothing: cuFile quietly copies through host memory where filesystem or device do not take part.
void probe(int fd, int cuda_device);

// Before the process is frozen: cuFile keeps threads.
void close_driver();

}  // namespace coldsnap::gds
