// SPDX-License-Identifier: Apache-2.0
// What devices say of themselves, and errors. Runtime API, "Device management" and "Error handling".
#include <cstdio>
#include <cstring>

#include "world.h"

namespace fake_gpu {

struct ErrorName {
  int code;
  const char* name;
};

static const ErrorName ERROR_NAMES[] = {
#include "error_names.inc"  // made from the headers by build.py
};

// Torch and its callers look for some of these words.
static const ErrorName ERROR_TEXTS[] = {
    {cudaSuccess, "no error"},
    {cudaErrorInvalidValue, "invalid argument"},
    {cudaErrorMemoryAllocation, "out of memory"},
    {cudaErrorInvalidPitchValue, "invalid pitch argument"},
    {cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"},
    {cudaErrorNoDevice, "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "invalid resource handle"},
    {cudaErrorIllegalState, "the operation cannot be performed in the present state"},
    {cudaErrorNotReady, "device not ready"},
    {cudaErrorIllegalAddress, "an illegal memory access was encountered"},
    {cudaErrorAssert, "device-side assert triggered"},
    {cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region"},
    {cudaErrorLaunchFailure, "unspecified launch failure"},
    {cudaErrorNotPermitted, "operation not permitted"},
    {cudaErrorNotSupported, "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "attempt to terminate a thread-local capture sequence from another thread"},
};

template <size_t many>
static const char* text_of(const ErrorName (&all)[many], int code) {
  for (auto& each : all)
    if (each.code == code) return each.name;
  return nullptr;
}

}  // namespace fake_gpu

using namespace fake_gpu;

extern "C" {

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
  w.devices[size_t(device)].active = true;
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
  found->totalGlobalMem = w.devices[size_t(device)].total;
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
  CALL(cudaDeviceGetPCIBusId);
  if (device < 0 || device >= int(w.devices.size())) return error(cudaErrorInvalidDevice);
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
// An error that stays comes from every call, and is never cleared.
cudaError_t cudaGetLastError() {
  if (int code = the().broken) return cudaError_t(code);
  int code = last_error;
  last_error = 0;
  return cudaError_t(code);
}
cudaError_t cudaPeekAtLastError() {
  int code = the().broken;
  return cudaError_t(code ? code : last_error);
}

const char* cudaGetErrorName(cudaError_t code) {
  const char* name = text_of(ERROR_NAMES, code);
  return name ? name : "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t code) {
  const char* text = text_of(ERROR_TEXTS, code);
  return text ? text : cudaGetErrorName(code);
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

}  // extern "C"
