// SPDX-License-Identifier: Apache-2.0
// Kernels that torch launches itself, and the driver. Nearly all of torch's operations are done by
// ../kernels.cpp and launch nothing; of compiled kernels only the one that passes time is known.
#include <cstring>

#include "world.h"

namespace fake_gpu {

static const size_t MOST_NAME = 60;

struct Configuration {  // of a launch, between the brackets and the call
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
static thread_local std::vector<Configuration> configurations;

}  // namespace fake_gpu

using namespace fake_gpu;

extern "C" {

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
  Body body;
  bool passes_time = name.find("spin_kernel") != string::npos;  // torch.cuda._sleep
  if (passes_time) {
    auto cycles = *static_cast<int64_t*>(values[0]);
    if (w.order == "threads")
      body = [cycles] { std::this_thread::sleep_for(std::chrono::nanoseconds(cycles / 2)); };
  } else if (!w.skip_kernels) {
    if (say_once(w, name)) say("kernel %s is not there", name.c_str());
    return error(cudaErrorNotSupported);
  }
  Stream* stream = stream_of(w, handle);
  if (!stream) return error(cudaErrorInvalidResourceHandle);
  UNLESS_REFUSED(refusal(w, *stream));
  name = "kernel " + name.substr(0, MOST_NAME);
  if (stream->capture) {
    put(w, lock, *stream, name, body);
    return cudaSuccess;
  }
  enqueue(w, *stream, name, body)->passes_time = passes_time;
  go_on(w, lock, true);
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

// -- the driver, as far as torch asks for it -----------------------------------------------------------

static int driver_nothing() { return 801; }
int fake_gpu_context_state(int device, unsigned* flags, int* active) {
  World& w = the();
  Lock lock(w.mutex);
  *flags = 0;
  *active = device < int(w.devices.size()) && w.devices[size_t(device)].active;
  return 0;
}
static int driver_text(int code, const char** text) {
  *text = cudaGetErrorName(cudaError_t(code));
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
