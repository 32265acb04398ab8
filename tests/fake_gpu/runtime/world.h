// SPDX-License-Identifier: Apache-2.0
// What the runtime knows, and what its parts call of one another. docs/FAKE_GPU.md says what it is for.
//
// Everything is of one World under one mutex. Calls of CUDA's API take the mutex, and leave it only while
// an operation's body runs.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
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
#include <unordered_set>
#include <vector>

namespace fake_gpu {

using std::string;
using Address = uintptr_t;
using Lock = std::unique_lock<std::mutex>;
using Body = std::function<void()>;

struct Op;
struct Stream;
using OpPtr = std::shared_ptr<Op>;

struct Span {  // of bytes, by the address that callers know
  Address from, to;
  bool writes;
};

// What is given to a stream: a copy, a kernel, an event, a wait, a host function.
struct Op {
  uint64_t id = 0;
  string name;
  Stream* stream = nullptr;
  std::vector<OpPtr> deps;  // what must have ended before it begins
  Body body;
  bool host_function = false;
  bool passes_time = false;   // and so ends only when somebody waits
  std::vector<Span> spans;    // what it touches; sorted once it has run
  std::vector<Span> touched;  // what its body says meanwhile
  bool running = false, done = false;
  uint64_t seen = 0;  // how many operations there were when the host saw its end; 0: it has not
  uint64_t mark = 0;  // of the last walk over the graph that met it
  std::chrono::steady_clock::time_point ended;
};

// An operation of a graph: each launch makes an Op of it.
struct Node {
  string name;
  Body body;
  std::vector<Span> spans;
  bool host_function = false;
  size_t line = 0;            // the nodes of one line follow one another: those captured from one stream
  std::vector<size_t> after;  // nodes that end before it begins
};

struct Capture {
  int mode = 0;
  std::thread::id thread;
  unsigned long long id = 0;
  Stream* origin = nullptr;
  std::vector<Node> nodes;
  struct Place {
    size_t line = 0;
    std::vector<size_t> after;  // what the stream's next node follows
  };
  std::map<Stream*, Place> places;  // of the origin, and of each stream that joined by an event
  size_t lines = 1;
  bool invalid = false, ended = false;
};
using CapturePtr = std::shared_ptr<Capture>;

struct Stream {
  int number = 0, device = 0, priority = 0;
  bool blocking = true, legacy = false, destroyed = false;
  OpPtr tail;               // the last that it was given
  std::deque<OpPtr> queue;  // what has not run
  size_t asked = 0;         // how often it was asked for since then
  CapturePtr capture;
};

struct Event {
  unsigned flags = 0;
  int device = 0;
  OpPtr last;  // what was recorded last
  size_t asked = 0;
  CapturePtr capture;         // where it was recorded last, if that was in a capture
  std::vector<size_t> after;  // the capture's nodes that it stands for
};

struct Graph {
  std::vector<Node> nodes;
  size_t lines = 1;
};

struct Launchable {  // what CUDA calls an executable graph
  Graph graph;
  std::vector<Stream*> lines;  // all but the first, which is the stream that it is launched into
  OpPtr last;
};

struct Device {
  char* seen = nullptr;   // where callers see its memory; the host faults there
  char* alias = nullptr;  // where the same memory is worked on
  size_t total = 0, used = 0;
  std::map<Address, size_t> taken, free;
  Stream legacy;
  bool active = false;  // it has a context
};

struct Pinned {
  size_t bytes;
  bool registered;  // or allocated
  int device;       // that was current then
};

struct Fault {
  size_t after, times;
  int code;
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Device> devices;
  std::map<Address, Pinned> pinned;
  std::deque<Stream> all_streams;  // a stream's record stays when it is destroyed: operations name it
  std::vector<Stream*> streams;    // that may have work; each device's legacy stream apart
  std::unordered_set<const void*> handles;  // of streams and events that callers may use
  std::vector<OpPtr> ran;                   // that one which has not run may meet without an order
  std::vector<CapturePtr> captures;
  std::map<string, uint64_t> calls, kernels;
  std::map<string, Fault> faults;
  std::set<string> told;
  std::unordered_map<const void*, string> functions;
  uint64_t ops = 0, marks = 0, races = 0, captured = 0, violations = 0, failed = 0;
  size_t keep = 100;  // how many of ``ran`` there may be before some are forgotten
  int running = 0, most_running = 1;
  std::atomic<int> broken{0};  // an error that stays
  std::mt19937_64 chance;
  string order;
  size_t polls = 20;
  bool protect = true, poison = true, race_abort = false, race_check = true, race_each = false, skip_kernels = false;
  bool pageable_late = false, stop = false;
  FILE* log = nullptr;
};

extern thread_local int current_device, last_error, capture_mode;
extern thread_local Op* running_op;  // on this thread

// -- world.cpp ---------------------------------------------------------------------------------------

World& the();
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
bool say_once(World&, const string& what);  // whether it was not said before
cudaError_t error(int code);                // keeps it as this thread's last error
int enter(const char* name);                // counts a call; returns an error that it is to give
size_t below(World&, size_t many);          // a number by chance

#define CALL(name)              \
  World& w = the();             \
  Lock lock(w.mutex);           \
  if (int code = enter(#name)) return error(code)

// Returns what another function refuses with.
#define UNLESS_REFUSED(answer) \
  if (int code = (answer)) return error(code)

// -- memory.cpp --------------------------------------------------------------------------------------

enum class Where { device, pinned, pageable, bad };
Device* device_of(World&, Address);  // null: it is not on a GPU
Where where(World&, const void* place, size_t bytes);  // bad: it leaves its allocation or registration
char* alias(World&, const void* place);

// -- races.cpp ---------------------------------------------------------------------------------------

void sort_spans(std::vector<Span>&);
bool meets(const std::vector<Span>& ones, const std::vector<Span>& others);  // both sorted: bytes in common, one writing
void check_races(World&, const OpPtr&);
const Op* at_work_on(World&, std::vector<Span>);  // whose end the host has not seen
void see(World&, const OpPtr&);                   // the host has seen its end
void forget(World&, Address from, Address to);    // these bytes are nobody's any more

// -- operations.cpp ----------------------------------------------------------------------------------

Stream& add_stream(World&, int device, bool blocking, int priority);
void remove_stream(World&, Stream&);  // once it has ended its work
Stream* stream_of(World&, cudaStream_t);  // null: there is none
int refusal(World&, Stream&);             // the error of giving it work now, or 0

// Gives a stream an operation and does no more; the stream is not capturing.
OpPtr enqueue(World&, Stream&, string name, Body, std::vector<Span> = {}, std::vector<OpPtr> deps = {});
// Gives a stream an operation; null: it was captured. Others may have run when it returns.
OpPtr put(World&, Lock&, Stream&, string name, Body, std::vector<Span> = {}, std::vector<OpPtr> deps = {});
void go_on(World&, Lock&, bool given);  // what a device does of its own accord
// ``seen``: whether a program may count on the wait.
void await(World&, Lock&, OpPtr, bool seen = true);
void await_all(World&, Lock&, const std::vector<OpPtr>&, bool seen = true);
std::vector<OpPtr> tails_of_stream(World&, Stream&);
std::vector<OpPtr> tails_of_device(World&, int device);
std::vector<OpPtr> tails_of_all(World&);
cudaError_t ask(World&, Lock&, const std::vector<OpPtr>&, size_t& asked);
void work_on_thread();

// -- captures.cpp ------------------------------------------------------------------------------------

bool is_unsafe_now(World&);  // a capture forbids this thread what a graph cannot hold; it is invalid then
void capture_op(Capture&, Stream&, Node);
int capture_event(Stream&, Event&);
int join_capture(World&, Stream&, Event&);  // a stream waits for a captured event
bool is_captured_on(World&, int device);    // and invalidates that

#define UNSAFE() \
  if (is_unsafe_now(w)) return error(cudaErrorStreamCaptureUnsupported)

}  // namespace fake_gpu
