// SPDX-License-Identifier: Apache-2.0
// What is not CUDA's: for the kernels that run on the host, and for tests. See ../control.py.
#include <cstdio>

#include "world.h"

using namespace fake_gpu;

extern "C" {

void* fake_gpu_alias(const void* place) {
  World& w = the();
  return alias(w, place);
}

// Gives a stream a function. It may say with fake_gpu_touch what it touches. ``drop`` frees ``what``.
int fake_gpu_enqueue(void* handle, void (*function)(void*), void (*drop)(void*), void* what, const char* name) {
  World& w = the();
  Lock lock(w.mutex);
  std::shared_ptr<void> held(what, drop);
  if (int code = enter("kernel")) return error(code);
  w.kernels[name]++;
  Stream* stream = stream_of(w, static_cast<cudaStream_t>(handle));
  if (!stream) return error(cudaErrorInvalidResourceHandle);
  UNLESS_REFUSED(refusal(w, *stream));
  put(w, lock, *stream, name, [function, held] { function(held.get()); });
  return last_error;
}

void fake_gpu_touch(const void* place, size_t bytes, int writes) {
  if (running_op && bytes) running_op->touched.push_back({Address(place), Address(place) + bytes, writes != 0});
}

// For a kernel that an interpreter runs on the host: where the host has ``count`` items of ``item``
// bytes. Those that ``mask`` has are touched by the operation at work; a place that is not the GPU's
// to touch is a violation, and the host's own address is returned for it.
void fake_gpu_reach(const Address* places, const unsigned char* mask, Address* found, size_t count, size_t item,
                    int writes) {
  World& w = the();
  std::vector<Span> spans;
  Address from = 0, to = 0;
  auto end = [&] {
    if (to > from) spans.push_back({from, to, writes != 0});
  };
  Device* device = nullptr;
  for (size_t at = 0; at < count; at++) {
    Address place = places[at];
    if (!device || place - Address(device->seen) >= device->total) device = device_of(w, place);
    found[at] = device ? Address(device->alias) + (place - Address(device->seen)) : place;
    if (!mask[at] || (place >= from && place + item <= to)) continue;
    if (place != to) {
      end();
      from = place;
    }
    to = place + item;
  }
  end();
  if (!running_op) return;
  if (spans.size() > 8) sort_spans(spans);
  Lock lock(w.mutex);
  for (const Span& span : spans) {
    running_op->touched.push_back(span);
    for (Address place : {span.from, span.to - 1}) {
      Where there = where(w, reinterpret_cast<void*>(place), 1);
      if (there == Where::device || there == Where::pinned) continue;
      w.violations++;
      if (say_once(w, "kernel / " + running_op->name))
        say("#%lu %s %s %#zx, which is not the GPU's", (unsigned long)running_op->id, running_op->name.c_str(),
            writes ? "writes" : "reads", size_t(place));
    }
  }
}

// Waits for a stream before something works on the host with its bytes, where a GPU would not wait.
void fake_gpu_drain(void* handle) {
  World& w = the();
  Lock lock(w.mutex);
  if (Stream* stream = stream_of(w, static_cast<cudaStream_t>(handle))) await_all(w, lock, tails_of_stream(w, *stream));
}

// Waits for a stream as a kernel does whose results the host needs. Returns the error of that, or 0.
int fake_gpu_wait(void* handle) {
  World& w = the();
  Lock lock(w.mutex);
  Stream* stream = stream_of(w, static_cast<cudaStream_t>(handle));
  if (!stream) return error(cudaErrorInvalidResourceHandle);
  if (stream->capture) {
    stream->capture->invalid = true;
    return error(cudaErrorStreamCaptureUnsupported);
  }
  UNSAFE();
  await_all(w, lock, tails_of_stream(w, *stream));
  return error(w.broken);
}

// A call fails with ``code`` after ``after`` calls, ``times`` times.
void fake_gpu_inject(const char* call, size_t after, size_t times, int code) {
  World& w = the();
  Lock lock(w.mutex);
  w.faults[call] = {after, times, code};
}

// From now on every call fails, as after a kernel that touched what it should not; 0: no more.
void fake_gpu_break(int code) {
  World& w = the();
  Lock lock(w.mutex);
  w.broken = code;
}

void fake_gpu_reseed(const char* order, size_t seed) {
  World& w = the();
  Lock lock(w.mutex);
  if (order && *order && w.order != "threads") w.order = order;
  w.chance.seed(seed);
}

size_t fake_gpu_races() {
  World& w = the();
  Lock lock(w.mutex);
  return w.races;
}

size_t fake_gpu_violations() {
  World& w = the();
  Lock lock(w.mutex);
  return w.violations;
}

// How many calls have failed that fake_gpu_inject told to.
size_t fake_gpu_failed() {
  World& w = the();
  Lock lock(w.mutex);
  return w.failed;
}

size_t fake_gpu_pending() {
  World& w = the();
  Lock lock(w.mutex);
  size_t count = 0;
  for (auto& device : w.devices) count += device.legacy.queue.size();
  for (auto* stream : w.streams) count += stream->queue.size();
  return count;
}

// The host reads or writes memory now: returns 1 if work is under way there.
int fake_gpu_host_touches(const void* place, size_t bytes, int writes) {
  World& w = the();
  Lock lock(w.mutex);
  const Op* found = at_work_on(w, {{Address(place), Address(place) + bytes, writes != 0}});
  if (!found) return 0;
  w.violations++;
  if (say_once(w, "host / " + found->name))
    say("HOST: %s memory that #%lu %s (stream %d) is at work on", writes ? "writes" : "reads",
        (unsigned long)found->id, found->name.c_str(), found->stream->number);
  return 1;
}

// "name count" lines of all calls, or kernels.
size_t fake_gpu_counts(int kernels, char* text, size_t room) {
  World& w = the();
  Lock lock(w.mutex);
  string all;
  for (auto& [name, count] : kernels ? w.kernels : w.calls) all += name + " " + std::to_string(count) + "\n";
  snprintf(text, room, "%s", all.c_str());
  return all.size();
}

cudaError_t fake_gpu_unimplemented(const char* name) {
  World& w = the();
  Lock lock(w.mutex);
  w.calls[name]++;
  if (say_once(w, name)) say("%s is not there", name);
  return error(cudaErrorNotSupported);
}

}  // extern "C"
