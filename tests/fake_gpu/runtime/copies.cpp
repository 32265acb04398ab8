// SPDX-License-Identifier: Apache-2.0
// Copies and fills. Runtime API, "API synchronization behavior", and each function's own text.
//
// Pageable memory: the text of CUDA 13.0 says that such copies "might be synchronous", and that what must be
// staged in pinned memory may wait for the stream. Here the source is taken in the call and the target is
// there when it returns, as drivers stage it; FAKE_GPU_PAGEABLE=late does neither.
#include <algorithm>
#include <cstring>

#include "world.h"

namespace fake_gpu {

static const size_t MOST_PITCH = 0x7fffffff;

struct Rows {
  void* at;
  size_t pitch;
  size_t reach(size_t width, size_t height) const { return pitch * (height - 1) + width; }
};

static void add_spans(std::vector<Span>& spans, const Rows& rows, size_t width, size_t height, bool writes) {
  Address from = Address(rows.at);
  if (rows.pitch == width || height == 1) {
    spans.push_back({from, from + width * height, writes});
    return;
  }
  for (size_t row = 0; row < height; row++)
    spans.push_back({from + row * rows.pitch, from + row * rows.pitch + width, writes});
}

static bool overlap(const Rows& one, const Rows& other, size_t width, size_t height) {
  std::vector<Span> ones, others;
  add_spans(ones, one, width, height, true);
  add_spans(others, other, width, height, true);
  return meets(ones, others);
}

// Memory management, "Unified Addressing": page-locked memory has a pointer for devices, which is its own
// address, so that a copy between devices' pointers may have it on either side.
static bool has_kind(int kind, Where to, Where from) {
  bool to_device = to == Where::device, from_device = from == Where::device;
  switch (kind) {
    case cudaMemcpyHostToHost: return !to_device && !from_device;
    case cudaMemcpyHostToDevice: return to_device && !from_device;
    case cudaMemcpyDeviceToHost: return !to_device && from_device;
    case cudaMemcpyDeviceToDevice: return to != Where::pageable && from != Where::pageable;
    default: return true;
  }
}

struct Copy {
  Rows target, source;
  size_t width, height;
  int kind;
  Where to, from;  // what kinds of memory these are

  bool to_device() const { return to == Where::device; }
  bool from_device() const { return from == Where::device; }
  string name() const {
    static const char* const names[] = {"copy host to host", "copy to device", "copy to host", "copy on device"};
    string found = names[(to_device() ? 1 : 0) + (from_device() ? 2 : 0)];
    if (height > 1) found += " in rows";
    if (from == Where::pageable) found += " from pageable memory";
    if (to == Where::pageable) found += " to pageable memory";
    return found;
  }
};

// Finds what memory a copy is between. Returns the error that refuses it, or 0. What CUDA calls undefined,
// memory of another kind than said and sides that overlap, is a violation.
static int look_at(World& w, Copy& copy) {
  size_t width = copy.width, height = copy.height;
  if (copy.kind < cudaMemcpyHostToHost || copy.kind > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
  if (width > copy.target.pitch || width > copy.source.pitch) return cudaErrorInvalidPitchValue;
  if (height > 1 && (copy.target.pitch > MOST_PITCH || copy.source.pitch > MOST_PITCH))
    return cudaErrorInvalidPitchValue;
  copy.to = where(w, copy.target.at, copy.target.reach(width, height));
  copy.from = where(w, copy.source.at, copy.source.reach(width, height));
  if (copy.to == Where::bad || copy.from == Where::bad) {
    w.violations++;
    say("a copy of %zu rows of %zu bytes leaves what was allocated or registered at once (%s)", height, width,
        copy.to == Where::bad ? "target" : "source");
    return cudaErrorInvalidValue;
  }
  if (!has_kind(copy.kind, copy.to, copy.from)) {
    w.violations++;
    say("a copy of kind %d between other kinds of memory", copy.kind);
    return cudaErrorInvalidValue;
  }
  if (copy.target.at != copy.source.at && overlap(copy.target, copy.source, width, height)) {
    w.violations++;
    say("the source and the target of a copy overlap");
  }
  return 0;
}

static Body body_of(World& w, const Copy& copy, std::shared_ptr<std::vector<char>> kept) {
  Rows target{alias(w, copy.target.at), copy.target.pitch};
  Rows source = kept ? Rows{kept->data(), copy.width} : Rows{alias(w, copy.source.at), copy.source.pitch};
  return [target, source, width = copy.width, height = copy.height, kept] {
    for (size_t row = 0; row < height; row++)
      memmove(static_cast<char*>(target.at) + row * target.pitch, static_cast<char*>(source.at) + row * source.pitch,
              width);
  };
}

// Pageable memory that is copied to a device is first copied into pinned memory, within the call.
static std::shared_ptr<std::vector<char>> stage(const Copy& copy) {
  auto kept = std::make_shared<std::vector<char>>(copy.width * copy.height);
  for (size_t row = 0; row < copy.height; row++)
    memcpy(kept->data() + row * copy.width, static_cast<char*>(copy.source.at) + row * copy.source.pitch, copy.width);
  return kept;
}

// Whether the call returns only when the copy has ended.
static bool returns_at_end(World& w, const Copy& copy, bool is_async) {
  if (!copy.to_device() && !copy.from_device()) return true;  // between host memory, also of the Async kind
  if (is_async) return copy.to == Where::pageable && !w.pageable_late;
  if (copy.from_device()) return !copy.to_device();
  return copy.from == Where::pinned;  // pageable: once it is staged
}

static cudaError_t give_copy(World& w, Lock& lock, Copy copy, Stream& stream, bool is_async) {
  if (int code = refusal(w, stream)) return cudaError_t(code);
  if (!copy.width || !copy.height) return cudaSuccess;
  if (int code = look_at(w, copy)) return cudaError_t(code);
  bool pageable = copy.from == Where::pageable || copy.to == Where::pageable;
  if (stream.capture && pageable) {
    stream.capture->invalid = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  std::vector<Span> spans;
  std::shared_ptr<std::vector<char>> kept;
  if (copy.from == Where::pageable && copy.to_device() && !(is_async && w.pageable_late)) {
    if (!is_async) await_all(w, lock, tails_of_stream(w, stream));
    // "The driver may synchronize with the stream": by chance, and nobody may count on it.
    bool may_wait = w.order == "random" || w.order == "mixed";
    if (is_async && may_wait && below(w, 2)) await(w, lock, stream.tail, false);
    kept = stage(copy);
  } else {
    add_spans(spans, copy.source, copy.width, copy.height, false);
  }
  add_spans(spans, copy.target, copy.width, copy.height, true);
  OpPtr op = put(w, lock, stream, copy.name(), body_of(w, copy, kept), std::move(spans));
  if (op && returns_at_end(w, copy, is_async)) await(w, lock, op);
  return cudaSuccess;
}

static Copy plain(void* target, const void* source, size_t bytes, int kind) {
  return {{target, bytes}, {const_cast<void*>(source), bytes}, bytes, 1, kind, Where::bad, Where::bad};
}

static cudaError_t set(World& w, Lock& lock, void* place, int value, size_t bytes, Stream& stream, bool is_async) {
  if (int code = refusal(w, stream)) return cudaError_t(code);
  if (!bytes) return cudaSuccess;
  Where at = where(w, place, bytes);
  if (at != Where::device && at != Where::pinned) return cudaErrorInvalidValue;
  std::vector<Span> spans{{Address(place), Address(place) + bytes, true}};
  auto body = [to = alias(w, place), value, bytes] { memset(to, value, bytes); };
  OpPtr op = put(w, lock, stream, "memset", body, std::move(spans));
  // "Memset": asynchronous, but for pinned memory without "Async".
  if (op && !is_async && at == Where::pinned) await(w, lock, op);
  return cudaSuccess;
}

// -- cudaMemcpyBatchAsync ----------------------------------------------------------------------------

static bool are_attributes_right(const cudaMemcpyAttributes* attributes, const size_t* firsts, size_t many,
                                 size_t count) {
  if (!attributes || !firsts || !many || many > count || firsts[0] != 0) return false;
  for (size_t at = 0; at < many; at++) {
    if (at && (firsts[at] <= firsts[at - 1] || firsts[at] >= count)) return false;
    auto order = attributes[at].srcAccessOrder;
    if (order < cudaMemcpySrcAccessOrderStream || order > cudaMemcpySrcAccessOrderAny) return false;
  }
  return true;
}

// Copies of a batch have no order: none may depend on another.
static void look_for_dependence(World& w, const std::vector<Copy>& copies) {
  std::vector<Span> written, read;
  for (const Copy& copy : copies) {
    add_spans(written, copy.target, copy.width, 1, true);
    add_spans(read, copy.source, copy.width, 1, false);
  }
  std::sort(written.begin(), written.end(), [](const Span& one, const Span& two) { return one.from < two.from; });
  bool twice = false;
  for (size_t at = 1; at < written.size(); at++) twice = twice || written[at].from < written[at - 1].to;
  sort_spans(written);
  if (!twice && !meets(read, written)) return;
  w.violations++;
  say("copies of one batch depend on one another");
}

// The source is read in the stream's order; or within the call, or at any time until the end, in which cases
// nothing that was given before may still write it.
static std::shared_ptr<std::vector<char>> batch_source(World& w, const Copy& copy, int order,
                                                       std::vector<Span>& spans) {
  add_spans(spans, copy.source, copy.width, 1, false);
  if (order == cudaMemcpySrcAccessOrderStream) return nullptr;
  if (const Op* op = at_work_on(w, {spans.back()})) {
    w.violations++;
    say("a batch reads out of order what #%lu %s is at work on", (unsigned long)op->id, op->name.c_str());
  }
  if (order == cudaMemcpySrcAccessOrderAny && below(w, 2)) return nullptr;
  auto kept = std::make_shared<std::vector<char>>(copy.width);
  memcpy(kept->data(), alias(w, copy.source.at), copy.width);
  if (order == cudaMemcpySrcAccessOrderDuringApiCall) spans.pop_back();
  return kept;
}

}  // namespace fake_gpu

using namespace fake_gpu;

extern "C" {

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind kind, cudaStream_t on) {
  CALL(cudaMemcpyAsync);
  Stream* stream = stream_of(w, on);
  if (!stream) return error(cudaErrorInvalidResourceHandle);
  return error(give_copy(w, lock, plain(target, source, bytes, kind), *stream, true));
}

cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind kind) {
  CALL(cudaMemcpy);
  UNSAFE();
  return error(give_copy(w, lock, plain(target, source, bytes, kind), *stream_of(w, nullptr), false));
}

cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t on) {
  CALL(cudaMemcpy2DAsync);
  Stream* stream = stream_of(w, on);
  if (!stream) return error(cudaErrorInvalidResourceHandle);
  Copy copy{{target, target_pitch}, {const_cast<void*>(source), source_pitch}, width, height, kind, Where::bad,
            Where::bad};
  return error(give_copy(w, lock, copy, *stream, true));
}

cudaError_t cudaMemcpyBatchAsync(void* const* targets, const void* const* sources, const size_t* sizes, size_t count,
                                 cudaMemcpyAttributes* attributes, size_t* firsts, size_t many, cudaStream_t on) {
  CALL(cudaMemcpyBatchAsync);
  Stream* stream = stream_of(w, on);
  if (!stream) return error(cudaErrorInvalidResourceHandle);
  if (stream->legacy || !count || !are_attributes_right(attributes, firsts, many, count))
    return error(cudaErrorInvalidValue);
  if (stream->capture) {  // a graph has no node for it
    stream->capture->invalid = true;
    return error(cudaErrorStreamCaptureUnsupported);
  }
  std::vector<Copy> copies;
  for (size_t at = 0; at < count; at++) {
    copies.push_back(plain(targets[at], sources[at], sizes[at], cudaMemcpyDefault));
    if (!sizes[at]) return error(cudaErrorInvalidValue);
    UNLESS_REFUSED(look_at(w, copies.back()));
  }
  look_for_dependence(w, copies);
  std::vector<Span> spans;
  std::vector<Body> bodies;
  for (size_t at = 0, group = 0; at < count; at++) {
    if (group + 1 < many && firsts[group + 1] == at) group++;
    bodies.push_back(body_of(w, copies[at], batch_source(w, copies[at], attributes[group].srcAccessOrder, spans)));
    add_spans(spans, copies[at].target, copies[at].width, 1, true);
  }
  std::shuffle(bodies.begin(), bodies.end(), w.chance);
  auto body = [bodies] {
    for (auto& each : bodies) each();
  };
  put(w, lock, *stream, "batch of copies", body, std::move(spans));
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* place, int value, size_t bytes, cudaStream_t on) {
  CALL(cudaMemsetAsync);
  Stream* stream = stream_of(w, on);
  if (!stream) return error(cudaErrorInvalidResourceHandle);
  return error(set(w, lock, place, value, bytes, *stream, true));
}

cudaError_t cudaMemset(void* place, int value, size_t bytes) {
  CALL(cudaMemset);
  UNSAFE();
  return error(set(w, lock, place, value, bytes, *stream_of(w, nullptr), false));
}

}  // extern "C"
