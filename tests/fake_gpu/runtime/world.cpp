// SPDX-License-Identifier: Apache-2.0
// The world as the environment's variables have it, what it says, and each call's entry.
#include "world.h"

#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace fake_gpu {

thread_local int current_device = 0, last_error = 0, capture_mode = 0;
thread_local Op* running_op = nullptr;

static World* world = nullptr;

static size_t number(const char* name, size_t otherwise) {
  const char* said = getenv(name);
  return said && *said ? strtoull(said, nullptr, 0) : otherwise;
}

static string word(const char* name, const char* otherwise) {
  const char* said = getenv(name);
  return said && *said ? said : otherwise;
}

// Says which operation was at work, and where, when the process touched what it must not.
static void tell_crash(int number, siginfo_t* info, void*) {
  char line[300];
  int length = snprintf(line, sizeof line, "fake GPU: signal %d at %p while running %s\n", number, info->si_addr,
                        running_op ? running_op->name.c_str() : "no operation");
  if (write(2, line, size_t(length)) < 0) _exit(139);
  void* frames[40];
  backtrace_symbols_fd(frames, backtrace(frames, 40), 2);
  signal(number, SIG_DFL);
  raise(number);
}

// A device's memory has two addresses. Work is done at one; callers get the other, where the host faults.
static void make_device(Device& device, int number, size_t total, bool protect) {
  int flags = MAP_NORESERVE, file = int(syscall(SYS_memfd_create, "fake_gpu", 1u));
  if (file < 0 || ftruncate(file, off_t(total))) abort();
  device.total = total;
  device.alias = static_cast<char*>(mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | flags, file, 0));
  device.seen = device.alias;
  if (protect)
    device.seen = static_cast<char*>(mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0));
  if (device.alias == MAP_FAILED || device.seen == MAP_FAILED) abort();
  close(file);
  device.free[Address(device.seen)] = total;
  device.legacy.device = number;
  device.legacy.legacy = true;
}

// Threads must not be at work while the process takes its libraries down.
static void stop_threads() {
  Lock lock(world->mutex);
  world->stop = true;
  world->changed.wait_for(lock, std::chrono::seconds(5), [] { return world->running == 0; });
}

static void make_world() {
  auto* w = new World;
  w->order = word("FAKE_GPU_SCHED", "mixed");
  w->chance.seed(number("FAKE_GPU_SEED", 0));
  w->polls = number("FAKE_GPU_POLLS", 20);
  w->protect = number("FAKE_GPU_PROTECT", 1);
  w->poison = number("FAKE_GPU_POISON", 1);
  string races = word("FAKE_GPU_RACES", "log");
  w->race_abort = races == "abort";
  w->race_each = races == "each";
  w->race_check = races != "off";
  w->skip_kernels = word("FAKE_GPU_KERNELS", "refuse") == "skip";
  w->pageable_late = word("FAKE_GPU_PAGEABLE", "staged") == "late";
  if (const char* path = getenv("FAKE_GPU_LOG")) w->log = fopen(path, "a");
  w->devices.resize(number("FAKE_GPU_DEVICES", 1));
  size_t total = number("FAKE_GPU_MEM", size_t(6) << 30);
  for (size_t at = 0; at < w->devices.size(); at++) make_device(w->devices[at], int(at), total, w->protect);
  world = w;
  if (number("FAKE_GPU_SEGV", 0)) {
    struct sigaction action = {};
    action.sa_sigaction = tell_crash;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
  }
  if (w->order == "threads") {
    w->most_running = int(number("FAKE_GPU_THREADS", 3));
    for (int at = 0; at < w->most_running; at++) std::thread(work_on_thread).detach();
    atexit(stop_threads);
  }
}

World& the() {
  static std::once_flag once;
  std::call_once(once, make_world);
  return *world;
}

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

bool say_once(World& w, const string& what) { return w.told.insert(what).second; }

// "Error handling": cudaGetLastError gives the last error of this thread and clears it.
cudaError_t error(int code) {
  if (code) last_error = code;
  return cudaError_t(code);
}

int enter(const char* name) {
  World& w = the();
  w.calls[name]++;
  // cudaLaunchHostFunc: a host function must not call CUDA.
  if (running_op && running_op->host_function) {
    w.violations++;
    say("a host function calls %s", name);
    return cudaErrorNotPermitted;
  }
  auto found = w.faults.find(name);
  if (found != w.faults.end()) {
    Fault& fault = found->second;
    if (fault.after) {
      fault.after--;
    } else if (fault.times) {
      fault.times--;
      w.failed++;
      return fault.code;
    }
  }
  return w.broken;
}

size_t below(World& w, size_t many) { return std::uniform_int_distribution<size_t>(0, many - 1)(w.chance); }

}  // namespace fake_gpu
