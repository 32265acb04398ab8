// SPDX-License-Identifier: Apache-2.0
// Graphs made by capturing streams, and their launch.
//
// Programming Guide, "Creating a graph using stream capture" with "Cross-stream dependencies and events",
// "Prohibited and unhandled operations" and "Invalidation"; Runtime API, "Stream management" for the modes
// (cudaThreadExchangeStreamCaptureMode) and "Graph management" for the launch.
#include <algorithm>

#include "world.h"

namespace fake_gpu {

// A thread's own mode decides what forbids it what: in the default mode each capture that was begun in that
// mode, and its own; in the thread-local mode its own; in the relaxed mode none.
bool is_unsafe_now(World& w) {
  if (capture_mode == cudaStreamCaptureModeRelaxed) return false;
  bool found = false;
  for (auto& capture : w.captures) {
    bool own = capture->thread == std::this_thread::get_id();
    bool forbids = own ? capture->mode != cudaStreamCaptureModeRelaxed
                       : capture->mode == cudaStreamCaptureModeGlobal && capture_mode == cudaStreamCaptureModeGlobal;
    if (forbids) found = capture->invalid = true;
  }
  return found;
}

// A device that has a capturing stream cannot be waited for, in any mode.
bool is_captured_on(World& w, int device) {
  bool found = false;
  for (auto& capture : w.captures)
    for (auto& [stream, place] : capture->places)
      if (stream->device == device) found = capture->invalid = true;
  return found;
}

void capture_op(Capture& capture, Stream& stream, Node node) {
  auto& place = capture.places[&stream];
  node.line = place.line;
  node.after = place.after;
  place.after = {capture.nodes.size()};
  capture.nodes.push_back(std::move(node));
}

int capture_event(Stream& stream, Event& event) {
  event.capture = stream.capture;
  event.after = stream.capture->places[&stream].after;
  event.last = nullptr;
  return 0;
}

int join_capture(World& w, Stream& stream, Event& event) {
  CapturePtr capture = event.capture;
  if (capture->ended) return cudaErrorCapturedEvent;
  if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
  if (stream.legacy) {
    capture->invalid = true;
    return cudaErrorStreamCaptureImplicit;
  }
  if (stream.capture && stream.capture != capture) {
    capture->invalid = stream.capture->invalid = true;
    return cudaErrorStreamCaptureMerge;
  }
  auto added = capture->places.try_emplace(&stream);
  auto& place = added.first->second;
  if (added.second) place.line = capture->lines++;
  stream.capture = capture;
  std::set<size_t> after(place.after.begin(), place.after.end());
  after.insert(event.after.begin(), event.after.end());
  place.after.assign(after.begin(), after.end());
  return 0;
}

// Whether all that other streams have captured ends before what the origin would capture next.
static bool is_joined(const Capture& capture) {
  std::vector<size_t> open = capture.places.at(capture.origin).after;
  std::vector<bool> before(capture.nodes.size());
  while (!open.empty()) {
    size_t at = open.back();
    open.pop_back();
    if (before[at]) continue;
    before[at] = true;
    for (size_t each : capture.nodes[at].after) open.push_back(each);
  }
  return std::all_of(before.begin(), before.end(), [](bool each) { return each; });
}

static void end(World& w, Capture& capture) {
  capture.ended = true;
  for (auto& [stream, place] : capture.places) stream->capture = nullptr;
  auto is_it = [&](const CapturePtr& each) { return each.get() == &capture; };
  w.captures.erase(std::remove_if(w.captures.begin(), w.captures.end(), is_it), w.captures.end());
}

// A graph that is launched into a capturing stream becomes part of what is captured.
static void capture_launch(Capture& capture, Stream& stream, const Graph& graph) {
  auto& place = capture.places[&stream];
  size_t first = capture.nodes.size(), lines = capture.lines;
  std::set<size_t> last;
  for (Node node : graph.nodes) {
    for (size_t& each : node.after) each += first;
    for (size_t each : node.after) last.erase(each);
    if (node.after.empty()) node.after = place.after;
    node.line = node.line ? lines + node.line - 1 : place.line;
    last.insert(capture.nodes.size());
    capture.nodes.push_back(std::move(node));
  }
  capture.lines += graph.lines - 1;
  if (!graph.nodes.empty()) place.after.assign(last.begin(), last.end());
}

// cudaGraphLaunch: after what the stream was given before, and after the graph's last launch.
static void launch(World& w, Stream& stream, Launchable& launchable) {
  const Graph& graph = launchable.graph;
  OpPtr begin = enqueue(w, stream, "graph begins", nullptr, {}, {launchable.last});
  std::vector<OpPtr> ops, deps;
  for (const Node& node : graph.nodes) {
    Stream& on = node.line ? *launchable.lines[node.line - 1] : stream;
    deps.clear();
    for (size_t each : node.after) deps.push_back(ops[each]);
    if (deps.empty()) deps.push_back(begin);
    ops.push_back(enqueue(w, on, node.name, node.body, node.spans, deps));
    ops.back()->host_function = node.host_function;
  }
  deps.clear();
  for (auto* line : launchable.lines) deps.push_back(line->tail);
  launchable.last = enqueue(w, stream, "graph ends", nullptr, {}, deps);
}

}  // namespace fake_gpu

using namespace fake_gpu;

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  CALL(cudaThreadExchangeStreamCaptureMode);
  if (*mode < cudaStreamCaptureModeGlobal || *mode > cudaStreamCaptureModeRelaxed) return error(cudaErrorInvalidValue);
  int before = capture_mode;
  capture_mode = *mode;
  *mode = cudaStreamCaptureMode(before);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  CALL(cudaStreamBeginCapture);
  Stream* stream = stream_of(w, handle);
  if (!stream) return error(cudaErrorInvalidResourceHandle);
  if (stream->legacy) return error(cudaErrorStreamCaptureUnsupported);
  if (stream->capture) return error(cudaErrorIllegalState);
  auto capture = std::make_shared<Capture>();
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->id = ++w.captured;
  capture->origin = stream;
  capture->places[stream] = {};
  stream->capture = capture;
  w.captures.push_back(capture);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  CALL(cudaStreamIsCapturing);
  Stream* stream = stream_of(w, handle);
  if (!stream) return error(cudaErrorInvalidResourceHandle);
  if (stream->legacy)  // asking does not invalidate
    for (auto& capture : w.captures)
      for (auto& [joined, place] : capture->places)
        if (joined->blocking && joined->device == stream->device) return error(cudaErrorStreamCaptureImplicit);
  *status = !stream->capture           ? cudaStreamCaptureStatusNone
            : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  if (cudaError_t code = cudaStreamIsCapturing(handle, status)) return code;
  World& w = the();
  Lock lock(w.mutex);
  auto& capture = stream_of(w, handle)->capture;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  CALL(cudaStreamEndCapture);
  *graph = nullptr;
  Stream* stream = stream_of(w, handle);
  if (!stream) return error(cudaErrorInvalidResourceHandle);
  CapturePtr capture = stream->capture;
  if (!capture) return error(cudaErrorIllegalState);
  if (capture->origin != stream) {
    capture->invalid = true;
    return error(cudaErrorStreamCaptureUnmatched);
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return error(cudaErrorStreamCaptureWrongThread);
  end(w, *capture);
  if (capture->invalid) return error(cudaErrorStreamCaptureInvalidated);
  if (!is_joined(*capture)) return error(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(new Graph{capture->nodes, capture->lines});
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  CALL(cudaGraphInstantiate);
  auto* launchable = new Launchable{*reinterpret_cast<Graph*>(graph), {}, nullptr};
  for (size_t at = 1; at < launchable->graph.lines; at++)
    launchable->lines.push_back(&add_stream(w, current_device, false, 0));
  *made = reinterpret_cast<cudaGraphExec_t>(launchable);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(made, graph, flags);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  CALL(cudaGraphGetNodes);
  if (nodes) return error(cudaErrorNotSupported);  // nodes have no handles here
  *count = reinterpret_cast<Graph*>(graph)->nodes.size();
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  CALL(cudaGraphDestroy);
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  CALL(cudaGraphExecDestroy);
  auto* launchable = reinterpret_cast<Launchable*>(handle);
  for (auto* line : launchable->lines) remove_stream(w, *line);  // once what was launched has ended
  delete launchable;
  return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
  CALL(cudaGraphUpload);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t on) {
  CALL(cudaGraphLaunch);
  Stream* stream = stream_of(w, on);
  if (!stream) return error(cudaErrorInvalidResourceHandle);
  UNLESS_REFUSED(refusal(w, *stream));
  auto& launchable = *reinterpret_cast<Launchable*>(handle);
  if (stream->capture) {
    capture_launch(*stream->capture, *stream, launchable.graph);
    return cudaSuccess;
  }
  launch(w, *stream, launchable);
  go_on(w, lock, true);
  return cudaSuccess;
}

}  // extern "C"
