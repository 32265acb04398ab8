// SPDX-License-Identifier: Apache-2.0
// A CUDA runtime (libcudart.so.13) without a GPU: memory, streams, events, copies, captures.
//
// Device memory is host memory under two addresses: the one that callers get faults when the host
// touches it; the other ("alias") is where work really happens. Work is a graph of operations:
// each waits for the one before it on its stream, and for the events that its stream waits for.
// Nothing runs before somebody waits or asks, unless the scheduler chooses so (FAKE_GPU_SCHED):
//   eager     at once, in order
//   late      only what is waited for, and only then
//   contrary  when somebody waits: first all that he does not wait for
//   random    when somebody waits, asks or gives work: any operation that may run
//   mixed     one of these, by chance, at each occasion (default)
//   threads   FAKE_GPU_THREADS threads (3), any operation that may run, after a short sleep
// FAKE_GPU_SEED chooses the chances. Each operation's bytes are compared with those of all that the
// host has not seen end and that no order ties to it: FAKE_GPU_RACES = log (default), abort, off.
// Other variables: FAKE_GPU_DEVICES (1), FAKE_GPU_MEM (bytes of each, 6 GiB), FAKE_GPU_POLLS (how
// often an unfinished event may be asked for before it ends, 20), FAKE_GPU_PROTECT (1),
// FAKE_GPU_POISON (1: new memory is filled with A5), FAKE_GPU_LOG (file of all operations),
// FAKE_GPU_KERNELS (refuse, default; or skip: a kernel that is not known does nothing), FAKE_GPU_SEGV (1:
// say what was at work when the process crashed).
#include <cuda_runtime_api.h>

#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {

using std::string;
using Bytes = uintptr_t;
using Lock = std::unique_lock<std::mutex>;

size_t number(const char* name, size_t otherwise) {
  const char* said = getenv(name);
  return said && *said ? strtoull(said, nullptr, 0) : otherwise;
}
string word(const char* name, const char* otherwise) {
  const char* said = getenv(name);
  return said && *said ? said : otherwise;
}

struct Stream;
struct Op;
using OpP = std::shared_ptr<Op>;

struct Span {  // of bytes, by the address that callers know
  Bytes from, to;
  bool writes;
};

struct Op {
  uint64_t id = 0;
  string name;
  Stream* stream = nullptr;
  std::vector<OpP> deps;
  std::function<void()> body;
  std::vector<Span> spans;  // what it touches; sorted once it has run
  bool running = false, done = false;
  uint64_t seen = 0;  // how many operations there were when the host saw its end; 0: it has not
  uint64_t mark = 0;
  std::chrono::steady_clock::time_point ended;
};

struct Recorded {  // of a graph
  string name;
  std::function<void()> body;
  std::vector<Span> spans;
};

struct Capture {
  int mode = 0;
  std::thread::id thread;
  unsigned long long id = 0;
  std::vector<Recorded> ops;
  bool invalid = false;
};

struct Stream {
  int number = 0, device = 0, priority = 0;
  bool blocking = true;
  OpP tail;
  std::deque<OpP> queue;
  std::shared_ptr<Capture> capture;
};

struct Event {
  unsigned flags = 0;
  int device = 0;
  OpP last;
  size_t asked = 0;
  std::shared_ptr<Capture> capture;
};

struct Graph {
  std::vector<Recorded> ops;
};

struct Device {
  char *va = nullptr, *alias = nullptr;
  size_t total = 0, used = 0, peak = 0;
  std::map<Bytes, size_t> taken, free;
  Stream legacy;
  bool active = false;
};

struct Pinned {
  size_t bytes;
  bool registered;  // or allocated
};

struct Fault {
  size_t after, times;
  int code;
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Device> devices;
  std::map<Bytes, Pinned> pinned;
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<OpP> ran;  // that some operation which has not run may meet without an order
  std::map<string, uint64_t> calls, kernels;
  std::map<string, Fault> faults;
  std::set<string> told;
  std::unordered_map<const void*, string> functions;
  std::vector<std::shared_ptr<Capture>> captures;
  uint64_t ops = 0, marks = 0, races = 0, captured = 0, violations = 0;
  size_t keep = 100;
  int running = 0, most_running = 1, broken = 0;
  std::mt19937_64 chance;
  string sched;
  size_t polls = 20;
  bool protect = true, poison = true, race_abort = false, race_check = true, skip_kernels = false, stop = false;
  FILE* log = nullptr;
  std::vector<std::thread> threads;
};

World* world = nullptr;
std::once_flag once;
thread_local int current_device = 0, last_error = 0, capture_mode = 0;
thread_local Op* running_op = nullptr;
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

void work_on_thread();

// Says which operation was at work, and where, when the process touched what it must not.
void tell_crash(int number, siginfo_t* info, void*) {
  char line[300];
  int length = snprintf(line, sizeof line, "fake GPU: signal %d at %p while running %s\n", number, info->si_addr,
                        running_op ? running_op->name.c_str() : "no operation");
  if (write(2, line, size_t(length)) < 0) _exit(139);
  void* frames[40];
  backtrace_symbols_fd(frames, backtrace(frames, 40), 2);
  signal(number, SIG_DFL);
  raise(number);
}

void make_world() {
  auto* w = new World;
  w->sched = word("FAKE_GPU_SCHED", "mixed");
  w->chance.seed(number("FAKE_GPU_SEED", 0));
  w->polls = number("FAKE_GPU_POLLS", 20);
  w->protect = number("FAKE_GPU_PROTECT", 1);
  w->poison = number("FAKE_GPU_POISON", 1);
  string races = word("FAKE_GPU_RACES", "log");
  w->race_abort = races == "abort";
  w->race_check = races != "off";
  w->skip_kernels = word("FAKE_GPU_KERNELS", "refuse") == "skip";
  if (const char* path = getenv("FAKE_GPU_LOG")) w->log = fopen(path, "a");
  w->devices.resize(number("FAKE_GPU_DEVICES", 1));
  size_t total = number("FAKE_GPU_MEM", size_t(6) << 30);
  for (size_t at = 0; at < w->devices.size(); at++) {
    Device& device = w->devices[at];
    device.total = total;
    int flags = MAP_NORESERVE, file = int(syscall(SYS_memfd_create, "fake_gpu", 1u));
    if (file < 0 || ftruncate(file, off_t(total))) abort();
    device.alias = static_cast<char*>(mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | flags, file, 0));
    device.va = device.alias;
    if (w->protect)
      device.va = static_cast<char*>(mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0));
    if (device.alias == MAP_FAILED || device.va == MAP_FAILED) abort();
    close(file);
    device.free[Bytes(device.va)] = total;
    device.legacy.device = int(at);
    device.legacy.number = 0;
  }
  world = w;
  if (number("FAKE_GPU_SEGV", 0)) {
    struct sigaction action = {};
    action.sa_sigaction = tell_crash;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
  }
  if (w->sched == "threads") {
    w->most_running = int(number("FAKE_GPU_THREADS", 3));
    for (int at = 0; at < w->most_running; at++) w->threads.emplace_back(work_on_thread);
    for (auto& thread : w->threads) thread.detach();
  }
}

World& the() {
  std::call_once(once, make_world);
  return *world;
}

void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
void say(const char* format, ...) {
  char line[2000];
  va_list values;
  va_start(values, format);
  vsnprintf(line, sizeof line, format, values);
  va_end(values);
  fprintf(stderr, "fake GPU: %s\n", line);
  if (world && world->log) {
    fprintf(world->log, "! %s\n", line);
    fflush(world->log);
  }
}

cudaError_t error(int code) {
  if (code) last_error = code;
  return cudaError_t(code);
}

// -- each call -----------------------------------------------------------------------------------

int enter(const char* name) {  // the world is locked; returns an error to give
  World& w = the();
  w.calls[name]++;
  auto found = w.faults.find(name);
  if (found != w.faults.end()) {
    Fault& fault = found->second;
    if (fault.after) {
      fault.after--;
    } else if (fault.times) {
      fault.times--;
      return fault.code;
    }
  }
  return w.broken;
}

#define CALL(name)                  \
  World& w = the();                 \
  Lock lock(w.mutex);               \
  if (int code = enter(#name)) return error(code)

// A call that may not be made while another thread captures strictly.
bool forbidden(World& w) {
  if (capture_mode == cudaStreamCaptureModeRelaxed) return false;
  for (auto& capture : w.captures) {
    bool own = capture->thread == std::this_thread::get_id();
    if (capture->mode == cudaStreamCaptureModeGlobal ||
        (capture->mode == cudaStreamCaptureModeThreadLocal && own)) {
      capture->invalid = true;
      return true;
    }
  }
  return false;
}
#define UNSAFE() \
  if (forbidden(w)) return error(cudaErrorStreamCaptureUnsupported)

// -- memory --------------------------------------------------------------------------------------

Device* device_of(World& w, Bytes at) {
  for (auto& device : w.devices)
    if (at >= Bytes(device.va) && at < Bytes(device.va) + device.total) return &device;
  return nullptr;
}

char* alias(World& w, const void* place) {
  Device* device = device_of(w, Bytes(place));
  return device ? device->alias + (Bytes(place) - Bytes(device->va)) : static_cast<char*>(const_cast<void*>(place));
}

template <class Map>
typename Map::iterator holding(Map& map, Bytes at) {
  auto found = map.upper_bound(at);
  return found == map.begin() ? map.end() : std::prev(found);
}

enum class Where { device, pinned, pageable, bad };

Where where(World& w, const void* place, size_t bytes) {
  Bytes at = Bytes(place);
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

cudaError_t take(World& w, void** place, size_t bytes) {
  Device& device = w.devices[current_device];
  device.active = true;
  *place = nullptr;
  if (!bytes) return cudaSuccess;
  size_t whole = (bytes + 511) / 512 * 512;
  for (auto found = device.free.begin(); found != device.free.end(); ++found) {
    if (found->second < whole) continue;
    auto [start, length] = *found;
    device.free.erase(found);
    if (length > whole) device.free[start + whole] = length - whole;
    device.taken[start] = whole;
    device.used += whole;
    device.peak = std::max(device.peak, device.used);
    *place = reinterpret_cast<void*>(start);
    if (w.poison && whole <= (size_t(256) << 20)) memset(alias(w, *place), 0xA5, whole);
    return cudaSuccess;
  }
  return cudaErrorMemoryAllocation;
}

void give(World& w, Device& device, std::map<Bytes, size_t>::iterator taken) {
  auto [start, length] = *taken;
  device.taken.erase(taken);
  device.used -= length;
  if (length >= 4096) {
    Bytes page = (Bytes(alias(w, reinterpret_cast<void*>(start))) + 4095) & ~Bytes(4095);
    Bytes end = (Bytes(alias(w, reinterpret_cast<void*>(start))) + length) & ~Bytes(4095);
    if (end > page) madvise(reinterpret_cast<void*>(page), end - page, MADV_REMOVE);
  }
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

// -- races ---------------------------------------------------------------------------------------

void sort_spans(std::vector<Span>& spans) {
  std::sort(spans.begin(), spans.end(), [](const Span& one, const Span& two) {
    return std::tie(one.writes, one.from) < std::tie(two.writes, two.from);
  });
  std::vector<Span> merged;
  for (const Span& span : spans) {
    if (!merged.empty() && merged.back().writes == span.writes && span.from <= merged.back().to)
      merged.back().to = std::max(merged.back().to, span.to);
    else if (span.to > span.from)
      merged.push_back(span);
  }
  spans.swap(merged);
}

const Span* meets(const std::vector<Span>& ones, const std::vector<Span>& others) {
  for (const Span& one : ones) {
    for (int written = one.writes ? 0 : 1; written < 2; written++) {
      auto begin = std::partition_point(others.begin(), others.end(), [&](const Span& other) {
        return other.writes < bool(written) || (other.writes == bool(written) && other.to <= one.from);
      });
      if (begin != others.end() && begin->writes == bool(written) && begin->from < one.to) return &one;
    }
  }
  return nullptr;
}

void check_races(World& w, const OpP& op) {
  if (!w.race_check || op->spans.empty()) return;
  uint64_t mark = ++w.marks;
  std::vector<Op*> open{op.get()};
  while (!open.empty()) {
    Op* one = open.back();
    open.pop_back();
    for (auto& dep : one->deps)
      if (dep->mark != mark) {
        dep->mark = mark;
        open.push_back(dep.get());
      }
  }
  for (auto& other : w.ran) {
    if (other->mark == mark || other == op || other->stream == op->stream) continue;
    if (other->seen && other->seen < op->id) continue;  // the host gave this one knowing that one's end
    const Span* span = meets(op->spans, other->spans);
    if (!span) continue;
    w.races++;
    string pair = op->name + " / " + other->name;
    if (w.told.insert(pair).second)
      say("RACE: #%lu %s (stream %d) %s %zu bytes at %#zx, and nothing orders it with #%lu %s (stream %d)",
          (unsigned long)op->id, op->name.c_str(), op->stream->number, span->writes ? "writes" : "reads",
          size_t(span->to - span->from), size_t(span->from), (unsigned long)other->id, other->name.c_str(),
          other->stream->number);
    if (w.race_abort) abort();
  }
}

// The host touches memory: against all that it has not seen end, and all that has not run.
const Op* host_touches(World& w, std::vector<Span> spans) {
  sort_spans(spans);
  const Op* found = nullptr;
  for (auto& other : w.ran)
    if (!found && !other->seen && meets(spans, other->spans)) found = other.get();
  auto look = [&](Stream& stream) {
    for (auto& other : stream.queue) {
      auto theirs = other->spans;
      sort_spans(theirs);
      if (!found && meets(spans, theirs)) found = other.get();
    }
  };
  for (auto& device : w.devices) look(device.legacy);
  for (auto& stream : w.streams) look(*stream);
  return found;
}

// Forget what no operation that is still to run can meet without an order.
void retire(World& w) {
  uint64_t first = w.ops + 1;
  auto look = [&](Stream& stream) {
    if (!stream.queue.empty()) first = std::min(first, stream.queue.front()->id);
  };
  for (auto& device : w.devices) look(device.legacy);
  for (auto& stream : w.streams) look(*stream);
  auto gone = [first](const OpP& each) { return each->seen && each->seen < first; };
  for (auto& each : w.ran)
    if (gone(each)) each->deps.clear();
  w.ran.erase(std::remove_if(w.ran.begin(), w.ran.end(), gone), w.ran.end());
}

// The host has seen the end of an operation, and so of all before it.
void see(World& w, const OpP& op) {
  std::vector<OpP> open{op};
  while (!open.empty()) {
    OpP one = std::move(open.back());
    open.pop_back();
    if (one->seen) continue;
    one->seen = w.ops;
    for (auto& dep : one->deps) open.push_back(dep);
  }
  if (w.ran.size() > w.keep) {
    retire(w);
    w.keep = 2 * w.ran.size() + 100;
  }
}

// -- the graph of operations ---------------------------------------------------------------------

Stream* stream_of(World& w, cudaStream_t handle) {
  if (Bytes(handle) <= 2) return &w.devices[current_device].legacy;
  return reinterpret_cast<Stream*>(handle);
}

bool ready(const OpP& op) {
  if (op->running || op->done) return false;
  for (auto& dep : op->deps)
    if (!dep->done) return false;
  return true;
}

void all_ready(World& w, std::vector<OpP>& found) {
  auto look = [&](Stream& stream) {
    if (!stream.queue.empty() && ready(stream.queue.front())) found.push_back(stream.queue.front());
  };
  for (auto& device : w.devices) look(device.legacy);
  for (auto& stream : w.streams) look(*stream);
}

void run(World& w, Lock& lock, OpP op) {
  op->running = true;
  w.running++;
  lock.unlock();
  if (op->body) {
    Op* before = running_op;
    running_op = op.get();
    op->body();
    running_op = before;
  }
  lock.lock();
  op->body = nullptr;
  op->running = false;
  op->done = true;
  op->ended = std::chrono::steady_clock::now();
  w.running--;
  auto& queue = op->stream->queue;
  queue.erase(std::find(queue.begin(), queue.end(), op));
  if (w.log) fprintf(w.log, "%lu ran %s on %d\n", (unsigned long)op->id, op->name.c_str(), op->stream->number);
  sort_spans(op->spans);
  check_races(w, op);
  w.ran.push_back(op);
  if (w.ran.size() > 20000) see(w, w.ran[5000]);
  w.changed.notify_all();
}

size_t below(World& w, size_t many) { return std::uniform_int_distribution<size_t>(0, many - 1)(w.chance); }

bool run_any(World& w, Lock& lock) {
  if (w.running >= w.most_running) return false;
  std::vector<OpP> found;
  all_ready(w, found);
  if (found.empty()) return false;
  run(w, lock, found[below(w, found.size())]);
  return true;
}

void work_on_thread() {
  World& w = the();
  std::mt19937_64 chance(Bytes(&w) ^ Bytes(pthread_self()));
  Lock lock(w.mutex);
  while (!w.stop) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(chance() % 300));
    lock.lock();
    if (!run_any(w, lock)) w.changed.wait_for(lock, std::chrono::milliseconds(5));
  }
}

// Wait for a change, without Python's lock: the operation at work may be a kernel that Triton's
// interpreter runs.
void pause(World& w, Lock& lock) {
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

// Somebody waits for an operation.
void await(World& w, Lock& lock, OpP target) {
  if (!target) return;
  string how = w.sched;
  if (how == "mixed") how = std::vector<string>{"late", "contrary", "random"}[below(w, 3)];
  while (!target->done) {
    if (how == "threads" || w.running >= w.most_running) {
      pause(w, lock);
      continue;
    }
    uint64_t mark = ++w.marks;
    std::vector<OpP> open{target}, mine, others, found;
    target->mark = mark;
    while (!open.empty()) {
      OpP one = open.back();
      open.pop_back();
      for (auto& dep : one->deps)
        if (!dep->done && dep->mark != mark) {
          dep->mark = mark;
          open.push_back(dep);
        }
    }
    all_ready(w, found);
    for (auto& one : found) (one->mark == mark ? mine : others).push_back(one);
    auto* from = &mine;
    if (how == "contrary" && !others.empty()) from = &others;
    if (how == "random" && !others.empty() && (mine.empty() || below(w, 2))) from = &others;
    if (from->empty()) {
      if (w.running) {
        pause(w, lock);
        continue;
      }
      say("nothing can run, and #%lu %s has not run", (unsigned long)target->id, target->name.c_str());
      abort();
    }
    run(w, lock, (*from)[below(w, from->size())]);
  }
  see(w, target);
}

void await_stream(World& w, Lock& lock, Stream& stream) {
  await(w, lock, stream.tail);
  if (&stream == &w.devices[stream.device].legacy)  // it waits for all streams that block
    for (auto& other : w.streams)
      if (other->blocking && other->device == stream.device) await(w, lock, other->tail);
}

void await_device(World& w, Lock& lock, int device) {
  await(w, lock, w.devices[device].legacy.tail);
  for (size_t at = 0; at < w.streams.size(); at++)
    if (w.streams[at]->device == device) await(w, lock, w.streams[at]->tail);
}

// Something was given, or asked for: what a device does of its own accord meanwhile.
void go_on(World& w, Lock& lock, bool given) {
  if (w.sched == "eager") {
    while (run_any(w, lock)) {
    }
  } else if (w.sched == "random" || (w.sched == "mixed" && below(w, given ? 4 : 2) == 0)) {
    for (size_t steps = below(w, 4); steps > 0 && run_any(w, lock); steps--) {
    }
  } else if (w.sched == "threads") {
    w.changed.notify_all();
  }
}

OpP put(World& w, Lock& lock, Stream& stream, string name, std::function<void()> body, std::vector<Span> spans = {},
        std::vector<OpP> deps = {}) {
  if (stream.capture) {
    stream.capture->ops.push_back({std::move(name), std::move(body), std::move(spans)});
    return nullptr;
  }
  auto op = std::make_shared<Op>();
  op->id = ++w.ops;
  op->name = std::move(name);
  op->stream = &stream;
  op->body = std::move(body);
  op->spans = std::move(spans);
  op->deps = std::move(deps);
  auto after = [&](Stream& other) {
    if (other.tail && !other.tail->seen) op->deps.push_back(other.tail);
  };
  after(stream);
  Stream& legacy = w.devices[stream.device].legacy;
  if (&stream == &legacy) {
    for (auto& other : w.streams)
      if (other->blocking && other->device == stream.device) after(*other);
  } else if (stream.blocking) {
    after(legacy);
  }
  stream.tail = op;
  stream.queue.push_back(op);
  if (w.log) {
    fprintf(w.log, "%lu put %s on %d after", (unsigned long)op->id, op->name.c_str(), stream.number);
    for (auto& dep : op->deps) fprintf(w.log, " %lu", (unsigned long)dep->id);
    fprintf(w.log, "\n");
  }
  go_on(w, lock, true);
  return op;
}

// -- copies --------------------------------------------------------------------------------------

struct Place {
  char* at;
  size_t pitch;
};

void add_spans(std::vector<Span>& spans, const void* at, size_t pitch, size_t width, size_t height, bool writes) {
  Bytes from = Bytes(at);
  if (pitch == width || height == 1) {
    spans.push_back({from, from + width * height, writes});
    return;
  }
  for (size_t row = 0; row < height; row++) spans.push_back({from + row * pitch, from + row * pitch + width, writes});
}

cudaError_t copy(World& w, Lock& lock, void* dst, size_t dpitch, const void* src, size_t spitch, size_t width,
                 size_t height, int kind, Stream& stream, bool wait = false) {
  if (!width || !height) return cudaSuccess;
  if (height > 1 && (width > dpitch || width > spitch || dpitch > 0x7fffffff || spitch > 0x7fffffff))
    return cudaErrorInvalidPitchValue;
  Where to = where(w, dst, dpitch * (height - 1) + width), from = where(w, src, spitch * (height - 1) + width);
  if (to == Where::bad || from == Where::bad) {
    w.violations++;
    say("a copy of %zu rows of %zu bytes leaves what was allocated or registered at once (%s)", height, width,
        to == Where::bad ? "target" : "source");
    return cudaErrorInvalidValue;
  }
  bool to_device = to == Where::device, from_device = from == Where::device;
  if ((kind == cudaMemcpyHostToDevice && (!to_device || from_device)) ||
      (kind == cudaMemcpyDeviceToHost && (to_device || !from_device)) ||
      (kind == cudaMemcpyDeviceToDevice && !(to_device && from_device)) ||
      (kind == cudaMemcpyHostToHost && (to_device || from_device))) {
    w.violations++;
    say("a copy of kind %d between other kinds of memory", kind);
    return cudaErrorInvalidValue;
  }
  std::vector<Span> spans;
  const char* names[] = {"copy host to host", "copy to device", "copy to host", "copy on device"};
  string name = names[(to_device ? 1 : 0) + (from_device ? 2 : 0)];
  if (height > 1) name += " in rows";
  Place target{alias(w, dst), dpitch}, source{alias(w, src), spitch};
  std::shared_ptr<std::vector<char>> kept;
  if (from == Where::pageable) {
    // What is small is taken at once; else the stream is waited for first. The source is free then.
    if (stream.capture) return cudaErrorStreamCaptureUnsupported;
    if (width * height > (64 << 10)) await(w, lock, stream.tail);
    kept = std::make_shared<std::vector<char>>(width * height);
    for (size_t row = 0; row < height; row++)
      memcpy(kept->data() + row * width, source.at + row * source.pitch, width);
    source = {kept->data(), width};
    name += " from pageable memory";
  } else {
    add_spans(spans, src, spitch, width, height, false);
  }
  add_spans(spans, dst, dpitch, width, height, true);
  bool waits = wait || to == Where::pageable || (!to_device && !from_device);
  if (to == Where::pageable) {
    if (stream.capture) return cudaErrorStreamCaptureUnsupported;
    name += " to pageable memory";
  }
  auto body = [target, source, width, height, kept] {
    for (size_t row = 0; row < height; row++)
      memmove(target.at + row * target.pitch, source.at + row * source.pitch, width);
  };
  OpP op = put(w, lock, stream, name, body, std::move(spans));
  if (waits && op) await(w, lock, op);
  return cudaSuccess;
}

cudaError_t set(World& w, Lock& lock, void* place, int value, size_t bytes, Stream& stream) {
  if (!bytes) return cudaSuccess;
  if (where(w, place, bytes) == Where::bad) return cudaErrorInvalidValue;
  char* at = alias(w, place);
  std::vector<Span> spans{{Bytes(place), Bytes(place) + bytes, true}};
  put(w, lock, stream, "memset", [at, value, bytes] { memset(at, value, bytes); }, std::move(spans));
  return cudaSuccess;
}

cudaError_t ask(World& w, Lock& lock, const OpP& op, size_t& asked) {
  if (!op || op->done) {
    if (op) see(w, op);
    asked = 0;
    return cudaSuccess;
  }
  go_on(w, lock, false);
  if (!op->done && ++asked > w.polls && w.sched != "threads") await(w, lock, op);
  if (!op->done) return cudaErrorNotReady;
  see(w, op);
  asked = 0;
  return cudaSuccess;
}

}  // namespace

// ================================================================================================

extern "C" {

// -- what is not CUDA's: for the kernels that run on the host, and for tests -----------------------

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
  put(w, lock, *stream_of(w, static_cast<cudaStream_t>(handle)), name, [function, held] { function(held.get()); });
  return last_error;
}

void fake_gpu_touch(const void* place, size_t bytes, int writes) {
  if (running_op && bytes) running_op->spans.push_back({Bytes(place), Bytes(place) + bytes, writes != 0});
}

// For a kernel that an interpreter runs on the host: where the host has ``count`` items of ``item``
// bytes. Those that ``mask`` has are touched by the operation at work; a place that is not the GPU's
// to touch is a violation, and the host's own address is returned for it.
void fake_gpu_reach(const Bytes* places, const unsigned char* mask, Bytes* found, size_t count, size_t item,
                    int writes) {
  World& w = the();
  std::vector<Span> spans;
  Bytes from = 0, to = 0;
  auto end = [&] {
    if (to > from) spans.push_back({from, to, writes != 0});
  };
  Device* device = nullptr;
  for (size_t at = 0; at < count; at++) {
    Bytes place = places[at];
    if (!device || place - Bytes(device->va) >= device->total) device = device_of(w, place);
    found[at] = device ? Bytes(device->alias) + (place - Bytes(device->va)) : place;
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
    running_op->spans.push_back(span);
    for (Bytes place : {span.from, span.to - 1}) {
      Where there = where(w, reinterpret_cast<void*>(place), 1);
      if (there == Where::device || there == Where::pinned) continue;
      w.violations++;
      if (w.told.insert("kernel / " + running_op->name).second)
        say("#%lu %s %s %#zx, which is not the GPU's", (unsigned long)running_op->id, running_op->name.c_str(),
            writes ? "writes" : "reads", size_t(place));
    }
  }
}

void fake_gpu_drain(void* handle) {
  World& w = the();
  Lock lock(w.mutex);
  await_stream(w, lock, *stream_of(w, static_cast<cudaStream_t>(handle)));
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

void fake_gpu_reseed(const char* sched, size_t seed) {
  World& w = the();
  Lock lock(w.mutex);
  if (sched && *sched && w.sched != "threads") w.sched = sched;
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

size_t fake_gpu_pending() {
  World& w = the();
  Lock lock(w.mutex);
  size_t count = 0;
  for (auto& device : w.devices) count += device.legacy.queue.size();
  for (auto& stream : w.streams) count += stream->queue.size();
  return count;
}

// The host reads or writes memory now: returns 1 if work is under way there.
int fake_gpu_host_touches(const void* place, size_t bytes, int writes) {
  World& w = the();
  Lock lock(w.mutex);
  const Op* found = host_touches(w, {{Bytes(place), Bytes(place) + bytes, writes != 0}});
  if (!found) return 0;
  w.violations++;
  if (w.told.insert("host / " + found->name).second)
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
  if (w.told.insert(name).second) say("%s is not there", name);
  return error(cudaErrorNotSupported);
}

// -- devices and errors ----------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  CALL(cudaGetDeviceCount);
  *count = int(w.devices.size());
  return w.devices.empty() ? error(cudaErrorNoDevice) : cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  CALL(cudaGetDevice);
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  CALL(cudaSetDevice);
  if (device < 0 || device >= int(w.devices.size())) return error(cudaErrorInvalidDevice);
  current_device = device;
  w.devices[device].active = true;
  return cudaSuccess;
}
cudaError_t cudaInitDevice(int device, unsigned, unsigned) { return cudaSetDevice(device); }
cudaError_t cudaGetDeviceFlags(unsigned* flags) {
  *flags = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  CALL(cudaGetDeviceProperties);
  if (device < 0 || device >= int(w.devices.size())) return error(cudaErrorInvalidDevice);
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "fake GPU of host memory");
  snprintf(found->uuid.bytes, sizeof found->uuid.bytes, "fake GPU %d", device);
  found->totalGlobalMem = w.devices[device].total;
  found->sharedMemPerBlock = 48 << 10;
  found->regsPerBlock = 65536;
  found->warpSize = 32;
  found->memPitch = 0x7fffffff;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 0x7fffffff;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->totalConstMem = 64 << 10;
  found->major = 9;
  found->textureAlignment = 512;
  found->multiProcessorCount = 4;
  found->canMapHostMemory = found->concurrentKernels = found->unifiedAddressing = 1;
  found->asyncEngineCount = 3;
  found->pciBusID = 0xfa;
  found->pciDeviceID = device;
  found->memoryBusWidth = 64;
  found->l2CacheSize = 1 << 20;
  found->maxThreadsPerMultiProcessor = 2048;
  found->streamPrioritiesSupported = 1;
  found->sharedMemPerMultiprocessor = 228 << 10;
  found->regsPerMultiprocessor = 65536;
  found->canUseHostPointerForRegisteredMem = found->hostRegisterSupported = 1;
  found->sharedMemPerBlockOptin = 227 << 10;
  found->maxBlocksPerMultiProcessor = 32;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp all;
  if (cudaError_t code = cudaGetDeviceProperties(&all, device)) return code;
  switch (int(attribute)) {
    case cudaDevAttrMaxThreadsPerBlock: *value = all.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(all.sharedMemPerBlock); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(all.sharedMemPerBlockOptin); break;
    case cudaDevAttrMultiProcessorCount: *value = all.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = all.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = all.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = all.minor; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    case cudaDevAttrMaxPitch: *value = 0x7fffffff; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int room, int device) {
  snprintf(text, size_t(room), "0000:fa:%02x.0", device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit) {
  *value = 1024;
  return cudaSuccess;
}
cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() {
  CALL(cudaDeviceSynchronize);
  UNSAFE();
  await_device(w, lock, current_device);
  return cudaSuccess;
}
cudaError_t cudaDeviceReset() { return fake_gpu_unimplemented("cudaDeviceReset"); }  // vLLM's wrapper asks for it
cudaError_t cudaGetLastError() {
  int code = last_error;
  World& w = the();
  if (!w.broken) last_error = 0;
  return cudaError_t(w.broken ? w.broken : code);
}
cudaError_t cudaPeekAtLastError() { return cudaError_t(the().broken ? the().broken : last_error); }
const char* cudaGetErrorString(cudaError_t code) {
  switch (int(code)) {
    case 0: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorHostMemoryAlreadyRegistered: return "host memory is registered already";
    case cudaErrorHostMemoryNotRegistered: return "host memory is not registered";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorNoDevice: return "no device";
    default: return "an error of the fake runtime";
  }
}
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfFakeRuntime"; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// -- memory ----------------------------------------------------------------------------------------

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  CALL(cudaMemGetInfo);
  Device& device = w.devices[current_device];
  *total = device.total;
  *free = device.total - device.used;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** place, size_t bytes) {
  CALL(cudaMalloc);
  UNSAFE();
  return error(take(w, place, bytes));
}
cudaError_t cudaFree(void* place) {
  CALL(cudaFree);
  UNSAFE();
  if (!place) return cudaSuccess;
  Device* device = device_of(w, Bytes(place));
  if (!device) return error(cudaErrorInvalidValue);
  await_device(w, lock, int(device - w.devices.data()));
  auto found = device->taken.find(Bytes(place));
  if (found == device->taken.end()) return error(cudaErrorInvalidValue);
  give(w, *device, found);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** place, size_t bytes, unsigned) {
  CALL(cudaHostAlloc);
  UNSAFE();
  size_t whole = (bytes + 4095) / 4096 * 4096;
  void* found = mmap(nullptr, std::max<size_t>(whole, 4096), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return error(cudaErrorMemoryAllocation);
  w.devices[current_device].active = true;
  w.pinned[Bytes(found)] = {std::max<size_t>(whole, 4096), false};
  *place = found;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** place, size_t bytes) { return cudaHostAlloc(place, bytes, 0); }
cudaError_t cudaFreeHost(void* place) {
  CALL(cudaFreeHost);
  UNSAFE();
  if (!place) return cudaSuccess;
  auto found = w.pinned.find(Bytes(place));
  if (found == w.pinned.end() || found->second.registered) return error(cudaErrorInvalidValue);
  size_t bytes = found->second.bytes;
  if (const Op* op = host_touches(w, {{Bytes(place), Bytes(place) + bytes, true}})) {
    w.violations++;
    say("pinned memory is freed that #%lu %s is at work on", (unsigned long)op->id, op->name.c_str());
    for (size_t device = 0; device < w.devices.size(); device++) await_device(w, lock, int(device));
  }
  w.pinned.erase(Bytes(place));
  munmap(place, bytes);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* place, size_t bytes, unsigned) {
  CALL(cudaHostRegister);
  UNSAFE();
  Bytes at = Bytes(place);
  if (!bytes || device_of(w, at)) return error(cudaErrorInvalidValue);
  Bytes page = at & ~Bytes(4095), end = (at + bytes + 4095) & ~Bytes(4095);
  std::vector<unsigned char> there((end - page) / 4096);
  if (mincore(reinterpret_cast<void*>(page), end - page, there.data())) return error(cudaErrorInvalidValue);
  auto before = holding(w.pinned, at);
  if (before != w.pinned.end() && before->first + before->second.bytes > at)
    return error(cudaErrorHostMemoryAlreadyRegistered);
  auto next = w.pinned.lower_bound(at);
  if (next != w.pinned.end() && next->first < at + bytes) return error(cudaErrorHostMemoryAlreadyRegistered);
  w.devices[current_device].active = true;
  w.pinned[at] = {bytes, true};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* place) {
  CALL(cudaHostUnregister);
  UNSAFE();
  auto found = w.pinned.find(Bytes(place));
  if (found == w.pinned.end() || !found->second.registered) return error(cudaErrorHostMemoryNotRegistered);
  if (const Op* op = host_touches(w, {{Bytes(place), Bytes(place) + found->second.bytes, true}})) {
    w.violations++;
    say("memory is unregistered that #%lu %s is at work on", (unsigned long)op->id, op->name.c_str());
    for (size_t device = 0; device < w.devices.size(); device++) await_device(w, lock, int(device));
  }
  w.pinned.erase(Bytes(place));
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** place, void* host, unsigned) {
  CALL(cudaHostGetDevicePointer);
  if (where(w, host, 1) != Where::pinned) return error(cudaErrorInvalidValue);
  *place = host;
  return cudaSuccess;
}
cudaError_t cudaHostGetFlags(unsigned* flags, void*) {
  *flags = 0;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* place) {
  CALL(cudaPointerGetAttributes);
  memset(found, 0, sizeof *found);
  Where at = where(w, place, 1);
  if (Device* device = device_of(w, Bytes(place))) {
    if (at != Where::device) return error(cudaErrorInvalidValue);
    found->type = cudaMemoryTypeDevice;
    found->device = int(device - w.devices.data());
    found->devicePointer = const_cast<void*>(place);
  } else if (at == Where::pinned) {
    found->type = cudaMemoryTypeHost;
    found->device = current_device;
    found->devicePointer = found->hostPointer = const_cast<void*>(place);
  } else {
    found->type = cudaMemoryTypeUnregistered;
    found->device = cudaInvalidDeviceId;
    found->hostPointer = const_cast<void*>(place);
  }
  return cudaSuccess;
}

// -- copies ----------------------------------------------------------------------------------------

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  CALL(cudaMemcpyAsync);
  return error(copy(w, lock, dst, bytes, src, bytes, bytes, 1, kind, *stream_of(w, stream)));
}
cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind) {
  CALL(cudaMemcpy);
  UNSAFE();
  return error(copy(w, lock, dst, bytes, src, bytes, bytes, 1, kind, *stream_of(w, nullptr), true));
}
cudaError_t cudaMemcpy2DAsync(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  CALL(cudaMemcpy2DAsync);
  return error(copy(w, lock, dst, dpitch, src, spitch, width, height, kind, *stream_of(w, stream)));
}
cudaError_t cudaMemcpyBatchAsync(void* const* dsts, const void* const* srcs, const size_t* sizes, size_t count,
                                 cudaMemcpyAttributes*, size_t*, size_t, cudaStream_t stream) {
  CALL(cudaMemcpyBatchAsync);
  if (Bytes(stream) <= 2) return error(cudaErrorInvalidValue);  // not on the default stream
  for (size_t at = 0; at < count; at++) {
    size_t bytes = sizes[at];
    auto* where_to = stream_of(w, stream);
    if (auto code = copy(w, lock, dsts[at], bytes, srcs[at], bytes, bytes, 1, cudaMemcpyDefault, *where_to))
      return error(code);
  }
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* place, int value, size_t bytes, cudaStream_t stream) {
  CALL(cudaMemsetAsync);
  return error(set(w, lock, place, value, bytes, *stream_of(w, stream)));
}
cudaError_t cudaMemset(void* place, int value, size_t bytes) {
  CALL(cudaMemset);
  UNSAFE();
  return error(set(w, lock, place, value, bytes, *stream_of(w, nullptr)));
}

// -- streams and events ----------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  CALL(cudaStreamCreateWithPriority);
  w.streams.push_back(std::make_unique<Stream>());
  Stream& made = *w.streams.back();
  made.number = int(w.streams.size());
  made.device = current_device;
  made.priority = priority;
  made.blocking = !(flags & cudaStreamNonBlocking);
  w.devices[current_device].active = true;
  *stream = reinterpret_cast<cudaStream_t>(&made);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // its number stays
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  CALL(cudaStreamGetPriority);
  *priority = stream_of(w, stream)->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  CALL(cudaStreamGetFlags);
  *flags = stream_of(w, stream)->blocking ? 0 : cudaStreamNonBlocking;
  return cudaSuccess;
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  CALL(cudaStreamGetDevice);
  *device = stream_of(w, stream)->device;
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  CALL(cudaStreamGetId);
  *id = (unsigned long long)(stream_of(w, stream)->number);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  CALL(cudaStreamSynchronize);
  Stream& stream = *stream_of(w, handle);
  if (stream.capture) {
    stream.capture->invalid = true;
    return error(cudaErrorStreamCaptureUnsupported);
  }
  UNSAFE();
  await_stream(w, lock, stream);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  CALL(cudaStreamQuery);
  UNSAFE();
  size_t asked = below(w, w.polls + 1);
  return error(ask(w, lock, stream_of(w, handle)->tail, asked));
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  CALL(cudaStreamWaitEvent);
  Stream& stream = *stream_of(w, handle);
  auto& given = *reinterpret_cast<Event*>(event);
  if (given.capture) {  // the stream joins what is captured
    stream.capture = given.capture;
    return cudaSuccess;
  }
  OpP last = given.last;
  if (stream.capture) return error(last ? cudaErrorStreamCaptureIsolation : cudaSuccess);
  if (!last || last->seen) return cudaSuccess;
  put(w, lock, stream, "wait for #" + std::to_string(last->id), nullptr, {}, {last});
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  CALL(cudaEventCreateWithFlags);
  auto* made = new Event;
  made->flags = flags;
  made->device = current_device;
  w.devices[current_device].active = true;
  *event = reinterpret_cast<cudaEvent_t>(made);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  CALL(cudaEventDestroy);
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned) {
  CALL(cudaEventRecord);
  auto& given = *reinterpret_cast<Event*>(event);
  Stream& stream = *stream_of(w, handle);
  if (given.device != stream.device) return error(cudaErrorInvalidResourceHandle);
  given.asked = 0;
  given.capture = stream.capture;
  if (stream.capture) return cudaSuccess;
  // The event is this operation before a thread may run it: so it is put by hand.
  string sched;
  std::swap(sched, w.sched);
  given.last = put(w, lock, stream, "event", nullptr);
  std::swap(sched, w.sched);
  go_on(w, lock, true);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaEventQuery(cudaEvent_t event) {
  CALL(cudaEventQuery);
  UNSAFE();
  auto& given = *reinterpret_cast<Event*>(event);
  if (given.capture) return error(cudaErrorCapturedEvent);
  OpP last = given.last;
  return error(ask(w, lock, last, given.asked));
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  CALL(cudaEventSynchronize);
  UNSAFE();
  OpP last = reinterpret_cast<Event*>(event)->last;
  await(w, lock, last);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  CALL(cudaEventElapsedTime);
  auto &one = *reinterpret_cast<Event*>(start), &two = *reinterpret_cast<Event*>(end);
  if (!one.last || !two.last || (one.flags | two.flags) & cudaEventDisableTiming)
    return error(cudaErrorInvalidResourceHandle);
  if (!one.last->done || !two.last->done) return error(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(two.last->ended - one.last->ended).count();
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* what) {
  CALL(cudaLaunchHostFunc);
  put(w, lock, *stream_of(w, stream), "host function", [function, what] { function(what); });
  return cudaSuccess;
}

// -- captures --------------------------------------------------------------------------------------

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  CALL(cudaThreadExchangeStreamCaptureMode);
  int before = capture_mode;
  capture_mode = *mode;
  *mode = cudaStreamCaptureMode(before);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  CALL(cudaStreamBeginCapture);
  Stream& stream = *stream_of(w, handle);
  if (Bytes(handle) <= 2) return error(cudaErrorStreamCaptureUnsupported);
  if (stream.capture) return error(cudaErrorIllegalState);
  auto capture = std::make_shared<Capture>();
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->id = ++w.captured;
  stream.capture = capture;
  w.captures.push_back(capture);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  CALL(cudaStreamIsCapturing);
  auto& capture = stream_of(w, handle)->capture;
  *status = !capture             ? cudaStreamCaptureStatusNone
            : capture->invalid   ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  cudaError_t code = cudaStreamIsCapturing(handle, status);
  World& w = the();
  Lock lock(w.mutex);
  auto& capture = stream_of(w, handle)->capture;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return code;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  CALL(cudaStreamEndCapture);
  Stream& stream = *stream_of(w, handle);
  *graph = nullptr;
  if (!stream.capture) return error(cudaErrorIllegalState);
  auto capture = stream.capture;
  w.captures.erase(std::find(w.captures.begin(), w.captures.end(), capture));
  for (auto& other : w.streams)
    if (other->capture == capture) other->capture = nullptr;
  if (capture->invalid) return error(cudaErrorStreamCaptureInvalidated);
  auto* made = new Graph;
  made->ops = capture->ops;
  *graph = reinterpret_cast<cudaGraph_t>(made);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  CALL(cudaGraphInstantiate);
  *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(made, graph, flags);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  CALL(cudaGraphGetNodes);
  *count = reinterpret_cast<Graph*>(graph)->ops.size();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  CALL(cudaGraphDestroy);
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  CALL(cudaGraphExecDestroy);
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t handle) {
  CALL(cudaGraphLaunch);
  for (auto& each : reinterpret_cast<Graph*>(graph)->ops)
    put(w, lock, *stream_of(w, handle), each.name, each.body, each.spans);
  return cudaSuccess;
}

// -- kernels ---------------------------------------------------------------------------------------

void** __cudaRegisterFatBinary(void*) {
  static void* none[1];
  return none;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  World& w = the();
  Lock lock(w.mutex);
  w.functions.emplace(host, name);
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (configurations.empty()) return error(cudaErrorMissingConfiguration);
  auto& last = configurations.back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  configurations.pop_back();
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** values, size_t, cudaStream_t handle) {
  CALL(cudaLaunchKernel);
  auto found = w.functions.find(function);
  string name = found == w.functions.end() ? "unknown kernel" : found->second;
  w.kernels[name]++;
  std::function<void()> body;
  if (name.find("spin_kernel") != string::npos) {
    auto cycles = *static_cast<int64_t*>(values[0]);
    if (w.sched == "threads")
      body = [cycles] { std::this_thread::sleep_for(std::chrono::nanoseconds(cycles / 2)); };
  } else if (!w.skip_kernels) {
    if (w.told.insert(name).second) say("kernel %s is not there", name.c_str());
    return error(cudaErrorNotSupported);
  }
  put(w, lock, *stream_of(w, handle), "kernel " + name.substr(0, 60), body);
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** values, size_t shared,
                               cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, values, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* function, void** values) {
  return cudaLaunchKernel(function, how->gridDim, how->blockDim, values, how->dynamicSmemBytes, how->stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** values, size_t shared,
                                        cudaStream_t stream) {
  return cudaLaunchKernel(function, grid, block, values, shared, stream);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
  *count = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
  *count = 2;
  return cudaSuccess;
}

// -- the driver, as far as torch asks for it ---------------------------------------------------------

static int driver_nothing() { return 801; }
int fake_gpu_context_state(int device, unsigned* flags, int* active) {
  World& w = the();
  Lock lock(w.mutex);
  *flags = 0;
  *active = device < int(w.devices.size()) && w.devices[device].active;
  return 0;
}
static int driver_text(int, const char** text) {
  *text = "an error of the fake driver";
  return 0;
}
static int driver_current(void** context) {
  *context = reinterpret_cast<void*>(0x1000);
  return 0;
}
static int driver_ok() { return 0; }
static int driver_version(int* version) {
  *version = CUDART_VERSION;
  return 0;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  string asked = name;
  void* place = reinterpret_cast<void*>(driver_nothing);
  if (asked == "cuDevicePrimaryCtxGetState") place = reinterpret_cast<void*>(fake_gpu_context_state);
  if (asked == "cuGetErrorString" || asked == "cuGetErrorName") place = reinterpret_cast<void*>(driver_text);
  if (asked == "cuCtxGetCurrent") place = reinterpret_cast<void*>(driver_current);
  if (asked == "cuCtxSetCurrent" || asked == "cuInit") place = reinterpret_cast<void*>(driver_ok);
  if (asked == "cuDriverGetVersion") place = reinterpret_cast<void*>(driver_version);
  *found = place;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char* name, void** found, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, found, CUDART_VERSION, flags, result);
}

}  // extern "C"
