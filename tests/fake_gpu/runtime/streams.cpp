// SPDX-License-Identifier: Apache-2.0
// Streams and events. Runtime API, "Stream management" and "Event management".
#include "world.h"

using namespace fake_gpu;

// Name the stream, or the event, of a handle; or refuse.
#define STREAM(name, handle)                                \
  Stream* found = stream_of(w, handle);                     \
  if (!found) return error(cudaErrorInvalidResourceHandle); \
  Stream& name = *found

#define EVENT(name, handle)                                               \
  if (!is_event(w, handle)) return error(cudaErrorInvalidResourceHandle); \
  Event& name = *reinterpret_cast<Event*>(handle)

static bool is_event(World& w, cudaEvent_t handle) {
  if (w.handles.count(handle)) return true;
  w.violations++;
  say("event %p is none, or none any more", static_cast<void*>(handle));
  return false;
}

// "Prohibited and unhandled operations": what is being captured cannot be waited for or asked for.
static bool is_capturing(World& w, Stream& stream) {
  if (stream.capture) stream.capture->invalid = true;
  return stream.capture || (stream.legacy && refusal(w, stream));
}

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  CALL(cudaStreamCreateWithPriority);
  if (flags & ~unsigned(cudaStreamNonBlocking)) return error(cudaErrorInvalidValue);
  Stream& made = add_stream(w, current_device, !(flags & cudaStreamNonBlocking), priority);
  w.handles.insert(&made);
  *stream = reinterpret_cast<cudaStream_t>(&made);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  CALL(cudaStreamDestroy);
  STREAM(stream, handle);
  if (!w.handles.count(handle)) return error(cudaErrorInvalidResourceHandle);  // a default stream
  if (stream.capture) stream.capture->invalid = true;
  remove_stream(w, stream);
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  CALL(cudaStreamGetPriority);
  STREAM(stream, handle);
  *priority = stream.priority;
  return cudaSuccess;
}
cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  CALL(cudaStreamGetFlags);
  STREAM(stream, handle);
  *flags = stream.blocking ? 0 : cudaStreamNonBlocking;
  return cudaSuccess;
}
cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  CALL(cudaStreamGetDevice);
  STREAM(stream, handle);
  *device = stream.device;
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  CALL(cudaStreamGetId);
  STREAM(stream, handle);
  *id = (unsigned long long)(stream.number);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  CALL(cudaStreamSynchronize);
  STREAM(stream, handle);
  if (is_capturing(w, stream)) return error(cudaErrorStreamCaptureUnsupported);
  UNSAFE();
  await_all(w, lock, tails_of_stream(w, stream));
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  CALL(cudaStreamQuery);
  STREAM(stream, handle);
  if (is_capturing(w, stream)) return error(cudaErrorStreamCaptureUnsupported);
  UNSAFE();
  return error(ask(w, lock, tails_of_stream(w, stream), stream.asked));
}

cudaError_t cudaDeviceSynchronize() {
  CALL(cudaDeviceSynchronize);
  if (is_captured_on(w, current_device)) return error(cudaErrorStreamCaptureUnsupported);
  UNSAFE();
  await_all(w, lock, tails_of_device(w, current_device));
  return cudaSuccess;
}

// The stream waits for what the event stands for now; a later record does not change that. An event that was
// never recorded stands for nothing.
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t which, unsigned flags) {
  CALL(cudaStreamWaitEvent);
  STREAM(stream, handle);
  EVENT(event, which);
  if (flags == cudaEventWaitExternal && stream.capture) return error(cudaErrorNotSupported);
  if (event.capture) return error(cudaError_t(join_capture(w, stream, event)));
  UNLESS_REFUSED(refusal(w, stream));
  OpPtr last = event.last;
  if (stream.capture) {
    if (!last) return cudaSuccess;
    stream.capture->invalid = true;
    return error(cudaErrorStreamCaptureIsolation);
  }
  if (!last || last->seen) return cudaSuccess;
  put(w, lock, stream, "wait for #" + std::to_string(last->id), nullptr, {}, {last});
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  CALL(cudaEventCreateWithFlags);
  auto* made = new Event;
  made->flags = flags;
  made->device = current_device;
  w.devices[size_t(current_device)].active = true;
  w.handles.insert(made);
  *event = reinterpret_cast<cudaEvent_t>(made);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

// It may be destroyed before it has ended, and does not wait.
cudaError_t cudaEventDestroy(cudaEvent_t which) {
  CALL(cudaEventDestroy);
  EVENT(event, which);
  w.handles.erase(&event);
  delete &event;
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t which, cudaStream_t handle, unsigned flags) {
  CALL(cudaEventRecord);
  STREAM(stream, handle);
  EVENT(event, which);
  if (event.device != stream.device) return error(cudaErrorInvalidResourceHandle);  // of one context
  UNLESS_REFUSED(refusal(w, stream));
  event.asked = 0;
  if (stream.capture) {
    if (flags == cudaEventRecordExternal) return error(cudaErrorNotSupported);
    return error(cudaError_t(capture_event(stream, event)));
  }
  event.capture = nullptr;
  event.last = enqueue(w, stream, "event", nullptr);  // before anything may run
  go_on(w, lock, true);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t which) {
  CALL(cudaEventQuery);
  EVENT(event, which);
  if (event.capture) return error(cudaErrorCapturedEvent);  // in each mode of a thread
  UNSAFE();
  OpPtr last = event.last;
  size_t asked = event.asked;
  cudaError_t code = ask(w, lock, {last}, asked);
  if (w.handles.count(which)) event.asked = asked;  // another thread may have destroyed it meanwhile
  return error(code);
}

cudaError_t cudaEventSynchronize(cudaEvent_t which) {
  CALL(cudaEventSynchronize);
  EVENT(event, which);
  if (event.capture) return error(cudaErrorCapturedEvent);
  UNSAFE();
  OpPtr last = event.last;
  await(w, lock, last);
  return cudaSuccess;
}

// It says nothing of whether errors are pending, and nobody learns by it that anything has ended.
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  CALL(cudaEventElapsedTime);
  EVENT(one, start);
  EVENT(two, end);
  if (one.capture || two.capture) return error(cudaErrorCapturedEvent);
  if (!one.last || !two.last || one.device != two.device || (one.flags | two.flags) & cudaEventDisableTiming)
    return error(cudaErrorInvalidResourceHandle);
  if (!one.last->done || !two.last->done) return error(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(two.last->ended - one.last->ended).count();
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* what) {
  CALL(cudaLaunchHostFunc);
  STREAM(stream, handle);
  UNLESS_REFUSED(refusal(w, stream));
  auto body = [function, what] { function(what); };
  if (stream.capture) {
    Node node;
    node.name = "host function";
    node.body = body;
    node.host_function = true;
    capture_op(*stream.capture, stream, std::move(node));
    return cudaSuccess;
  }
  enqueue(w, stream, "host function", body)->host_function = true;
  go_on(w, lock, true);
  return cudaSuccess;
}

}  // extern "C"
