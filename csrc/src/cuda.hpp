// The CUDA driver, found at run time: the few functions a transfer needs, behind one table.
//
// Driver calls only. After a reset of the primary context the runtime's caches of pinned pointers and events are dead,
// while the driver's own are rebuilt with the context.
#pragma once

#include <cstddef>
#include <cstdint>

namespace coldsnap::cuda {

using Result = int;
using Device = int;
using Pointer = unsigned long long;
struct ContextTag;
struct StreamTag;
struct EventTag;
using Context = ContextTag*;
using StreamHandle = StreamTag*;
using EventHandle = EventTag*;

struct Table {
  Result (*init)(unsigned flags);
  Result (*get_error_name)(Result error, const char** name);
  Result (*get_error_string)(Result error, const char** text);
  Result (*device_get)(Device* device, int ordinal);
  Result (*primary_retain)(Context* context, Device device);
  Result (*primary_release)(Device device);
  Result (*push_current)(Context context);
  Result (*pop_current)(Context* context);
  Result (*stream_create)(StreamHandle* stream, unsigned flags);
  Result (*stream_synchronize)(StreamHandle stream);
  Result (*stream_destroy)(StreamHandle stream);
  Result (*event_create)(EventHandle* event, unsigned flags);
  Result (*event_record)(EventHandle event, StreamHandle stream);
  Result (*event_synchronize)(EventHandle event);
  Result (*event_destroy)(EventHandle event);
  Result (*host_register)(void* address, size_t bytes, unsigned flags);
  Result (*host_unregister)(void* address);
  Result (*host_get_flags)(unsigned* flags, void* address);
  Result (*allocate)(Pointer* address, size_t bytes);
  Result (*free)(Pointer address);
  Result (*copy_to_device)(Pointer destination, const void* source, size_t bytes, StreamHandle stream);
  Result (*copy_to_host)(void* destination, Pointer source, size_t bytes, StreamHandle stream);
};

constexpr unsigned kRegisterPortable = 1;  // page-locked for every context
constexpr unsigned kRegisterReadOnly = 8;

// Load from a path, or the system's driver; INVALID when one is loaded already.
void load(const char* path);
// The table; loads the system's driver first. UNAVAILABLE where there is none, or it has no device.
const Table& table();

void check(Result result, const char* what);

// Holds a device's primary context and makes it current on the constructing thread. The engine in this process keeps it
// alive anyway; holding it means that a transfer can never outlive it.
class Session {
 public:
  explicit Session(int ordinal);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  Context context() const { return context_; }

 private:
  Device device_ = 0;
  Context context_ = nullptr;
};

// Makes a context current on this thread for a while.
class Current {
 public:
  explicit Current(Context context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

class Stream {
 public:
  Stream();
  ~Stream();  // waits: what a stream still copies from must stay
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void to_device(Pointer destination, const void* source, size_t bytes);
  void to_host(void* destination, Pointer source, size_t bytes);
  void synchronize();
  StreamHandle get() const { return handle_; }

 private:
  StreamHandle handle_ = nullptr;
};

// Device memory of the current context.
class Memory {
 public:
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  Pointer get() const { return address_; }

 private:
  Pointer address_ = 0;
};

// The moment when a stage's copies have been made. Unrecorded, it has passed.
class Event {
 public:
  Event();
  Event(Event&& other) noexcept;
  ~Event();
  void record(const Stream& stream);
  void wait();

 private:
  EventHandle handle_ = nullptr;
  bool recorded_ = false;
};

}  // namespace coldsnap::cuda
