// SPDX-License-Identifier: Apache-2.0
// Streams as queues of operations, and who of them runs next.
//
// Programming Guide, "Streams": operations of one stream run in the order in which they were given; of
// several streams in any order, or at once. What ties them: "Stream synchronization behavior" of the
// Runtime API (the legacy stream), and events. Nothing else does, and nothing runs before somebody waits or
// asks, unless the order chosen has it so; see docs/FAKE_GPU.md for the orders.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "world.h"

namespace fake_gpu {

// -- streams -----------------------------------------------------------------------------------------

Stream& add_stream(World& w, int device, bool blocking, int priority) {
  Stream& made = w.all_streams.emplace_back();
  made.number = int(w.all_streams.size());
  made.device = device;
  made.blocking = blocking;
  made.priority = priority;
  w.streams.push_back(&made);
  w.devices[size_t(device)].active = true;
  return made;
}

static void drop_if_ended(World& w, Stream& stream) {
  if (stream.destroyed && stream.queue.empty())
    w.streams.erase(std::remove(w.streams.begin(), w.streams.end(), &stream), w.streams.end());
}

// cudaStreamDestroy: it returns at once, and the stream goes when the device has completed its work.
void remove_stream(World& w, Stream& stream) {
  w.handles.erase(&stream);
  stream.destroyed = true;
  drop_if_ended(w, stream);
}

// The per-thread default stream is each thread's own, and otherwise as any blocking one.
static Stream& own_stream(World& w) {
  thread_local std::map<int, Stream*> own;
  Stream*& found = own[current_device];
  if (!found) found = &add_stream(w, current_device, true, 0);
  return *found;
}

Stream* stream_of(World& w, cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) return &w.devices[size_t(current_device)].legacy;
  if (handle == cudaStreamPerThread) return &own_stream(w);
  if (w.handles.count(handle)) return reinterpret_cast<Stream*>(handle);
  say("stream %p is none, or none any more", static_cast<void*>(handle));
  w.violations++;
  return nullptr;
}

// Programming Guide, "Stream capture", "Prohibited and unhandled operations".
int refusal(World& w, Stream& stream) {
  if (stream.capture) return stream.capture->invalid ? cudaErrorStreamCaptureInvalidated : 0;
  if (!stream.legacy) return 0;
  bool implicit = false;
  for (auto& capture : w.captures)
    for (auto& [joined, place] : capture->places)
      if (joined->blocking && joined->device == stream.device) implicit = capture->invalid = true;
  return implicit ? cudaErrorStreamCaptureImplicit : 0;
}

// -- the graph ---------------------------------------------------------------------------------------

OpPtr enqueue(World& w, Stream& stream, string name, Body body, std::vector<Span> spans, std::vector<OpPtr> deps) {
  auto op = std::make_shared<Op>();
  op->id = ++w.ops;
  op->name = std::move(name);
  op->stream = &stream;
  op->body = std::move(body);
  op->spans = std::move(spans);
  auto after = [&](const OpPtr& other) {
    if (other && !other->seen) op->deps.push_back(other);
  };
  for (auto& dep : deps) after(dep);
  after(stream.tail);
  // The legacy stream waits for all blocking streams of its device, and they for it.
  Stream& legacy = w.devices[size_t(stream.device)].legacy;
  if (stream.legacy) {
    for (auto* other : w.streams)
      if (other->blocking && other->device == stream.device) after(other->tail);
  } else if (stream.blocking) {
    after(legacy.tail);
  }
  stream.tail = op;
  stream.asked = 0;
  stream.queue.push_back(op);
  if (w.log) {
    fprintf(w.log, "%lu put %s on %d after", (unsigned long)op->id, op->name.c_str(), stream.number);
    for (auto& dep : op->deps) fprintf(w.log, " %lu", (unsigned long)dep->id);
    fprintf(w.log, "\n");
  }
  return op;
}

OpPtr put(World& w, Lock& lock, Stream& stream, string name, Body body, std::vector<Span> spans,
          std::vector<OpPtr> deps) {
  if (stream.capture) {
    Node node;
    node.name = std::move(name);
    node.body = std::move(body);
    node.spans = std::move(spans);
    capture_op(*stream.capture, stream, std::move(node));
    return nullptr;
  }
  OpPtr op = enqueue(w, stream, std::move(name), std::move(body), std::move(spans), std::move(deps));
  go_on(w, lock, true);
  return op;
}

static bool ready(const OpPtr& op) {
  return !op->running && std::all_of(op->deps.begin(), op->deps.end(), [](const OpPtr& dep) { return dep->done; });
}

static std::vector<OpPtr> all_ready(World& w) {
  std::vector<OpPtr> found;
  auto look = [&](Stream& stream) {
    if (!stream.queue.empty() && ready(stream.queue.front())) found.push_back(stream.queue.front());
  };
  for (auto& device : w.devices) look(device.legacy);
  for (auto* stream : w.streams) look(*stream);
  return found;
}

static void run(World& w, Lock& lock, OpPtr op) {
  op->running = true;
  w.running++;
  // cudaLaunchHostFunc: its start is as good as a wait for an event recorded before it; and it is not
  // called once the device has failed.
  if (op->host_function)
    for (auto& dep : op->deps) see(w, dep);
  Body body = std::move(op->body);
  if (op->host_function && w.broken) body = nullptr;
  lock.unlock();
  if (body) {
    Op* before = running_op;
    running_op = op.get();
    body();
    running_op = before;
    body = nullptr;  // it may hold tensors, and they may call CUDA as they go
  }
  lock.lock();
  op->running = false;
  op->done = true;
  op->ended = std::chrono::steady_clock::now();
  op->spans.insert(op->spans.end(), op->touched.begin(), op->touched.end());
  op->touched.clear();
  w.running--;
  op->stream->queue.pop_front();  // it was the first, since a stream keeps its order
  drop_if_ended(w, *op->stream);
  if (w.log) fprintf(w.log, "%lu ran %s on %d\n", (unsigned long)op->id, op->name.c_str(), op->stream->number);
  sort_spans(op->spans);
  check_races(w, op);
  w.changed.notify_all();
}

static bool run_any(World& w, Lock& lock) {
  if (w.running >= w.most_running) return false;
  auto found = all_ready(w);
  auto is_late = [&](const OpPtr& op) { return op->passes_time && w.order != "threads"; };
  found.erase(std::remove_if(found.begin(), found.end(), is_late), found.end());
  if (found.empty()) return false;
  run(w, lock, found[below(w, found.size())]);
  return true;
}

void work_on_thread() {
  World& w = the();
  std::mt19937_64 chance(Address(&w) ^ Address(pthread_self()));
  Lock lock(w.mutex);
  while (!w.stop) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(chance() % 300));
    lock.lock();
    if (!w.stop && !run_any(w, lock)) w.changed.wait_for(lock, std::chrono::milliseconds(5));
  }
}

// -- waiting -----------------------------------------------------------------------------------------

static uint64_t mark_all_before(World& w, const OpPtr& target) {
  uint64_t mark = ++w.marks;
  std::vector<OpPtr> open{target};
  target->mark = mark;
  while (!open.empty()) {
    OpPtr one = open.back();
    open.pop_back();
    for (auto& dep : one->deps)
      if (!dep->done && dep->mark != mark) {
        dep->mark = mark;
        open.push_back(dep);
      }
  }
  return mark;
}

// What runs while somebody waits for ``target``; null: what he waits for is running.
static OpPtr choose(World& w, const OpPtr& target, const string& how) {
  uint64_t mark = mark_all_before(w, target);
  std::vector<OpPtr> awaited, others;
  for (auto& one : all_ready(w)) (one->mark == mark ? awaited : others).push_back(one);
  auto* from = &awaited;
  if (how == "contrary" && !others.empty()) from = &others;
  if (how == "random" && !others.empty() && (awaited.empty() || below(w, 2))) from = &others;
  return from->empty() ? nullptr : (*from)[below(w, from->size())];
}

// Waits for a change without Python's lock: the operation at work may be a kernel that Triton's
// interpreter runs.
static void pause(World& w, Lock& lock) {
  static auto has_python = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  static auto leave_python = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
  static auto enter_python = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
  if (!has_python || !has_python()) return w.changed.wait(lock);
  void* thread = leave_python();
  w.changed.wait(lock);
  lock.unlock();  // whoever has Python's lock may want this one
  enter_python(thread);
  lock.lock();
}

void await(World& w, Lock& lock, OpPtr target, bool seen) {
  if (!target) return;
  string how = w.order;
  if (how == "mixed") how = std::vector<string>{"late", "contrary", "random"}[below(w, 3)];
  while (!target->done) {
    if (how == "threads" || w.running >= w.most_running) {
      pause(w, lock);
      continue;
    }
    if (OpPtr next = choose(w, target, how)) {
      run(w, lock, next);
    } else if (w.running) {
      pause(w, lock);
    } else {
      say("nothing can run, and #%lu %s has not run", (unsigned long)target->id, target->name.c_str());
      abort();
    }
  }
  if (seen) see(w, target);
}

void await_all(World& w, Lock& lock, const std::vector<OpPtr>& targets, bool seen) {
  for (auto& target : targets) await(w, lock, target, seen);
}

std::vector<OpPtr> tails_of_stream(World& w, Stream& stream) {
  std::vector<OpPtr> found{stream.tail};
  if (stream.legacy)
    for (auto* other : w.streams)
      if (other->blocking && other->device == stream.device) found.push_back(other->tail);
  return found;
}

std::vector<OpPtr> tails_of_device(World& w, int device) {
  std::vector<OpPtr> found{w.devices[size_t(device)].legacy.tail};
  for (auto* stream : w.streams)
    if (stream->device == device) found.push_back(stream->tail);
  return found;
}

std::vector<OpPtr> tails_of_all(World& w) {
  std::vector<OpPtr> found;
  for (size_t device = 0; device < w.devices.size(); device++)
    for (auto& tail : tails_of_device(w, int(device))) found.push_back(tail);
  return found;
}

// Something was given, or asked for.
void go_on(World& w, Lock& lock, bool given) {
  if (w.order == "eager") {
    while (run_any(w, lock)) {
    }
  } else if (w.order == "random" || (w.order == "mixed" && below(w, given ? 4 : 2) == 0)) {
    for (size_t steps = below(w, 4); steps > 0 && run_any(w, lock); steps--) {
    }
  } else if (w.order == "threads") {
    w.changed.notify_all();
  }
}

// A program that asks again and again gets its answer after FAKE_GPU_POLLS times.
cudaError_t ask(World& w, Lock& lock, const std::vector<OpPtr>& targets, size_t& asked) {
  auto ended = [&] {
    return std::all_of(targets.begin(), targets.end(), [](const OpPtr& op) { return !op || op->done; });
  };
  if (!ended()) go_on(w, lock, false);
  if (!ended() && ++asked > w.polls && w.order != "threads") await_all(w, lock, targets);
  if (!ended()) return cudaErrorNotReady;
  for (auto& op : targets)
    if (op) see(w, op);
  asked = 0;
  return cudaSuccess;
}

}  // namespace fake_gpu
