// SPDX-License-Identifier: Apache-2.0
// Memory of devices, and host memory that is page-locked. Runtime API, "Memory management".
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "world.h"

namespace fake_gpu {

static const size_t PAGE = 4096, GRANULE = 512;
static const size_t MOST_POISONED = size_t(256) << 20;  // of one allocation: more takes too long

Device* device_of(World& w, Address at) {
  for (auto& device : w.devices)
    if (at >= Address(device.seen) && at < Address(device.seen) + device.total) return &device;
  return nullptr;
}

char* alias(World& w, const void* place) {
  Device* device = device_of(w, Address(place));
  return device ? device->alias + (Address(place) - Address(device->seen))
                : static_cast<char*>(const_cast<void*>(place));
}

// The last entry that begins at an address or before it.
template <class Map>
static typename Map::iterator holding(Map& map, Address at) {
  auto found = map.upper_bound(at);
  return found == map.begin() ? map.end() : std::prev(found);
}

// CUDA knows page-locked memory by what was allocated or registered at once: a copy that crosses into other
// memory is refused.
Where where(World& w, const void* place, size_t bytes) {
  Address at = Address(place);
  if (Device* device = device_of(w, at)) {
    auto found = holding(device->taken, at);
    bool inside = found != device->taken.end() && at + bytes <= found->first + found->second;
    return inside ? Where::device : Where::bad;
  }
  auto found = holding(w.pinned, at);
  if (found != w.pinned.end() && at < found->first + found->second.bytes)
    return at + bytes <= found->first + found->second.bytes ? Where::pinned : Where::bad;
  auto next = w.pinned.lower_bound(at);
  return next != w.pinned.end() && next->first < at + bytes ? Where::bad : Where::pageable;
}

static cudaError_t take(World& w, void** place, size_t bytes) {
  Device& device = w.devices[size_t(current_device)];
  device.active = true;
  *place = nullptr;
  if (!bytes) return cudaSuccess;
  size_t whole = (bytes + GRANULE - 1) / GRANULE * GRANULE;
  for (auto found = device.free.begin(); found != device.free.end(); ++found) {
    if (found->second < whole) continue;
    auto [start, length] = *found;
    device.free.erase(found);
    if (length > whole) device.free[start + whole] = length - whole;
    device.taken[start] = whole;
    device.used += whole;
    *place = reinterpret_cast<void*>(start);
    // New memory is not zero on a GPU either.
    if (w.poison && whole <= MOST_POISONED) memset(alias(w, *place), 0xA5, whole);
    return cudaSuccess;
  }
  return cudaErrorMemoryAllocation;
}

static void give_pages_back(char* at, size_t bytes) {
  Address page = (Address(at) + PAGE - 1) & ~Address(PAGE - 1), end = (Address(at) + bytes) & ~Address(PAGE - 1);
  if (end > page) madvise(reinterpret_cast<void*>(page), end - page, MADV_REMOVE);
}

static void give(World& w, Device& device, std::map<Address, size_t>::iterator taken) {
  auto [start, length] = *taken;
  device.taken.erase(taken);
  device.used -= length;
  give_pages_back(alias(w, reinterpret_cast<void*>(start)), length);
  auto next = device.free.lower_bound(start);
  if (next != device.free.end() && next->first == start + length) {
    length += next->second;
    next = device.free.erase(next);
  }
  if (next != device.free.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == start) {
      before->second += length;
      return;
    }
  }
  device.free[start] = length;
}

// NVIDIA's text says of cudaHostUnregister and cudaFreeHost neither that they wait for work on that memory
// nor what becomes of it. So a program may count on nothing: it is a violation. They wait here so that the
// process lives to tell it.
static void leave_pinned(World& w, Lock& lock, void* place, size_t bytes, const char* how) {
  Address at = Address(place);
  if (const Op* op = at_work_on(w, {{at, at + bytes, true}})) {
    w.violations++;
    say("pinned memory is %s that #%lu %s is at work on", how, (unsigned long)op->id, op->name.c_str());
    await_all(w, lock, tails_of_all(w), false);
  }
  forget(w, at, at + bytes);
  w.pinned.erase(at);
}

static bool is_mapped(Address at, size_t bytes) {
  Address page = at & ~Address(PAGE - 1), end = (at + bytes + PAGE - 1) & ~Address(PAGE - 1);
  std::vector<unsigned char> there((end - page) / PAGE);
  return mincore(reinterpret_cast<void*>(page), end - page, there.data()) == 0;
}

}  // namespace fake_gpu

using namespace fake_gpu;

extern "C" {

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  CALL(cudaMemGetInfo);
  Device& device = w.devices[size_t(current_device)];
  *total = device.total;
  *free = device.total - device.used;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** place, size_t bytes) {
  CALL(cudaMalloc);
  UNSAFE();
  return error(take(w, place, bytes));
}

// It "may perform implicit synchronization": torch counts on that, so that it waits here; but no program
// learns by it that anything has ended.
cudaError_t cudaFree(void* place) {
  CALL(cudaFree);
  UNSAFE();
  if (!place) return cudaSuccess;
  Device* device = device_of(w, Address(place));
  if (!device) return error(cudaErrorInvalidValue);
  await_all(w, lock, tails_of_device(w, int(device - w.devices.data())), false);
  auto found = device->taken.find(Address(place));
  if (found == device->taken.end()) return error(cudaErrorInvalidValue);
  forget(w, found->first, found->first + found->second);
  give(w, *device, found);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** place, size_t bytes, unsigned) {
  CALL(cudaHostAlloc);
  UNSAFE();
  size_t whole = std::max((bytes + PAGE - 1) / PAGE * PAGE, PAGE);
  void* found = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return error(cudaErrorMemoryAllocation);
  w.devices[size_t(current_device)].active = true;
  w.pinned[Address(found)] = {whole, false, current_device};
  *place = found;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** place, size_t bytes) { return cudaHostAlloc(place, bytes, 0); }

cudaError_t cudaFreeHost(void* place) {
  CALL(cudaFreeHost);
  UNSAFE();
  if (!place) return cudaSuccess;
  auto found = w.pinned.find(Address(place));
  if (found == w.pinned.end() || found->second.registered) return error(cudaErrorInvalidValue);
  size_t bytes = found->second.bytes;
  leave_pinned(w, lock, place, bytes, "freed");
  munmap(place, bytes);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* place, size_t bytes, unsigned) {
  CALL(cudaHostRegister);
  UNSAFE();
  Address at = Address(place);
  if (!bytes || device_of(w, at) || !is_mapped(at, bytes)) return error(cudaErrorInvalidValue);
  auto before = holding(w.pinned, at);
  if (before != w.pinned.end() && before->first + before->second.bytes > at)
    return error(cudaErrorHostMemoryAlreadyRegistered);
  auto next = w.pinned.lower_bound(at);
  if (next != w.pinned.end() && next->first < at + bytes) return error(cudaErrorHostMemoryAlreadyRegistered);
  w.devices[size_t(current_device)].active = true;
  w.pinned[at] = {bytes, true, current_device};
  return cudaSuccess;
}

// "The base address must be the same one specified to cudaHostRegister."
cudaError_t cudaHostUnregister(void* place) {
  CALL(cudaHostUnregister);
  UNSAFE();
  auto found = w.pinned.find(Address(place));
  if (found == w.pinned.end() || !found->second.registered) return error(cudaErrorHostMemoryNotRegistered);
  leave_pinned(w, lock, place, found->second.bytes, "unregistered");
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** place, void* host, unsigned) {
  CALL(cudaHostGetDevicePointer);
  if (where(w, host, 1) != Where::pinned) return error(cudaErrorInvalidValue);
  *place = host;
  return cudaSuccess;
}

cudaError_t cudaHostGetFlags(unsigned* flags, void* host) {
  CALL(cudaHostGetFlags);
  if (where(w, host, 1) != Where::pinned) return error(cudaErrorInvalidValue);
  *flags = 0;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* place) {
  CALL(cudaPointerGetAttributes);
  memset(found, 0, sizeof *found);
  Where at = where(w, place, 1);
  if (Device* device = device_of(w, Address(place))) {
    if (at != Where::device) return error(cudaErrorInvalidValue);
    found->type = cudaMemoryTypeDevice;
    found->device = int(device - w.devices.data());
    found->devicePointer = const_cast<void*>(place);
  } else if (at == Where::pinned) {
    found->type = cudaMemoryTypeHost;
    found->device = holding(w.pinned, Address(place))->second.device;
    found->devicePointer = found->hostPointer = const_cast<void*>(place);
  } else {
    found->type = cudaMemoryTypeUnregistered;
    found->device = cudaInvalidDeviceId;
    found->hostPointer = const_cast<void*>(place);
  }
  return cudaSuccess;
}

}  // extern "C"
