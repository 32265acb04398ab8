// SPDX-License-Identifier: Apache-2.0
// Kernels of torch's CUDA build on the host: for each operation of torch that has a CUDA kernel, a
// function is given to the current stream of the fake runtime that does it by the CPU's kernel, on
// CPU tensors over the same bytes. Shapes, views, allocators, streams, events and copies are torch's
// own CUDA code. What depends on data (nonzero, equal), and what torch's "meta" device does not know,
// is waited for, as on a GPU where the host needs the answer.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <exception>
#include <memory>
#include <set>
#include <string>

#include "touches.h"

extern "C" {
void* fake_gpu_alias(const void*);
int fake_gpu_enqueue(void* stream, void (*)(void*), void (*)(void*), void*, const char* name);
int fake_gpu_wait(void* stream);
void fake_gpu_break(int code);
int cudaGetLastError();
}
namespace c10::cuda {  // of libc10_cuda.so
void c10_cuda_check_implementation(int32_t code, const char* file, const char* function, uint32_t line, bool);
}

namespace {

using fake_gpu::Used;
using torch::jit::Stack;

constexpr int ASSERTED = 710;  // cudaErrorAssert: a kernel found wrong what it was given

at::Tensor on_host(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(fake_gpu_alias(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.dim() == 0) return tensor;  // its number may decide about types
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

template <class Each>
c10::IValue each_tensor(const c10::IValue& value, c10::Device device, const Each& each) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? c10::IValue(each(tensor)) : value;
  }
  if (value.isList()) {
    auto list = value.toList();
    c10::impl::GenericList found(list.elementType());
    for (const c10::IValue& one : list) found.push_back(each_tensor(one, device, each));
    return found;
  }
  if (value.isDevice()) return device;
  if (value.isGenerator()) return c10::IValue();
  return value;
}

c10::Device device_in(const Stack& stack, size_t first) {
  std::optional<c10::Device> found;
  for (size_t at = first; at < stack.size() && !found; at++)
    each_tensor(stack[at], at::kCPU, [&](const at::Tensor& tensor) {
      if (tensor.is_cuda() && !found) found = tensor.device();
      return tensor;
    });
  return found ? *found : c10::impl::VirtualGuardImpl(at::kCUDA).getDevice();
}

void* stream_on(c10::Device device) { return c10::impl::VirtualGuardImpl(at::kCUDA).getStream(device).native_handle(); }

// What an operation returns that the host needs before it goes on.
struct Answer {
  Stack found;
  std::exception_ptr failure;
};

struct Job {
  c10::OperatorHandle op;
  Stack values;                     // on the host
  std::vector<Used> used;           // on the fake GPU
  std::vector<at::Tensor> results;  // on the host: of an operation that makes new tensors
  std::shared_ptr<Answer> answer;   // where its results go instead, if the host waits for them

  void use(const at::Tensor& tensor, bool writes, at::Tensor rows = {}, int64_t dim = 0) {
    if (!tensor.defined() || !tensor.is_cuda() || !tensor.numel()) return;
    Used one = Used::of(tensor, writes);
    one.rows = std::move(rows);
    one.dim = dim;
    used.push_back(std::move(one));
  }

  void run() {
    c10::InferenceMode mode(true);
    for (const Used& each : used) fake_gpu::touch(each);
    Stack stack = values;
    op.callBoxed(stack);
    for (size_t at = 0; at < results.size(); at++)
      if (results[at].defined()) results[at].copy_(stack[at].toTensor());
    if (answer) answer->found = std::move(stack);
  }

  void fail(const char* why) {
    if (answer) {
      answer->failure = std::current_exception();
      return;
    }
    // As a device-side assertion: all calls fail from then on.
    fprintf(stderr, "fake GPU: %s failed on the host: %.300s\n", op.schema().name().c_str(), why);
    fake_gpu_break(ASSERTED);
  }
};

void check(int code, const std::string& name) {
  if (code)
    c10::cuda::c10_cuda_check_implementation(cudaGetLastError(), __FILE__, name.c_str(), __LINE__, false);
}

void give(std::unique_ptr<Job> job, void* stream, const std::string& name) {
  auto run = [](void* what) {
    try {
      static_cast<Job*>(what)->run();
    } catch (const std::exception& error) {
      static_cast<Job*>(what)->fail(error.what());
    }
  };
  auto drop = [](void* what) { delete static_cast<Job*>(what); };
  check(fake_gpu_enqueue(stream, run, drop, job.release(), name.c_str()), name);
}

// The numbers of the rows that an operation uses of its first argument, on the host, and along which
// dimension; undefined where it uses all.
std::pair<at::Tensor, int64_t> rows_of(const std::string& name, const Stack& values) {
  const std::pair<at::Tensor, int64_t> all{{}, 0};
  if (values.empty() || !values[0].isTensor() || values[0].toTensor().dim() < 1) return all;
  if (name == "aten::index_select" || name == "aten::index_copy_") {
    int64_t dim = values[1].toInt();
    return {values[2].toTensor(), dim < 0 ? dim + values[0].toTensor().dim() : dim};
  }
  if (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_") {
    auto list = values[1].toList();
    if (list.empty()) return all;
    c10::IValue first = list.get(0);
    if (!first.isTensor() || !first.toTensor().defined()) return all;
    auto kind = first.toTensor().scalar_type();
    if (at::isIntegralType(kind, false)) return {first.toTensor(), 0};
  }
  return all;
}

std::vector<size_t> written_results(const c10::FunctionSchema& schema) {
  std::vector<size_t> found;  // for each result, the argument that it is
  for (const auto& result : schema.returns()) {
    size_t argument = SIZE_MAX;
    if (result.alias_info() && result.alias_info()->isWrite())
      for (size_t at = 0; at < schema.arguments().size(); at++) {
        auto* info = schema.arguments()[at].alias_info();
        if (info && info->isWrite() && info->beforeSets() == result.alias_info()->beforeSets()) argument = at;
      }
    found.push_back(argument);
  }
  return found;
}

// What an operation would return, of shapes alone; empty where only its data tell. Raises what it refuses.
Stack shapes_of(const c10::OperatorHandle& op, const Stack& on_meta_device, const std::vector<size_t>& argument_of) {
  Stack shapes = on_meta_device;
  try {
    op.callBoxed(shapes);
  } catch (const c10::NotImplementedError&) {
    return {};
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception&) {  // a "meta" function in Python says that it cannot know
    return {};
  }
  for (size_t at = 0; at < argument_of.size(); at++)
    if (argument_of[at] == SIZE_MAX && !shapes[at].isTensor()) return {};
  return shapes;
}

// ``out`` of another size takes the right one.
void resize_outputs(const c10::FunctionSchema& schema, const Stack& given, const Stack& on_meta_device) {
  for (size_t at = 0; at < given.size(); at++) {
    if (!on_meta_device[at].isTensor() || !given[at].isTensor() || !schema.arguments()[at].alias_info()) continue;
    const at::Tensor& tensor = given[at].toTensor();
    if (tensor.defined() && tensor.is_cuda() && on_meta_device[at].toTensor().sizes() != tensor.sizes())
      tensor.resize_(on_meta_device[at].toTensor().sizes());
  }
}

std::unique_ptr<Job> job_of(const c10::OperatorHandle& op, const Stack& given) {
  const auto& schema = op.schema();
  auto job = std::make_unique<Job>(Job{op, {}, {}, {}, nullptr});
  {
    c10::InferenceMode mode(true);
    for (const auto& value : given)
      job->values.push_back(each_tensor(value, at::kCPU, [](const at::Tensor& tensor) {
        return tensor.is_cuda() ? on_host(tensor) : tensor.clone();
      }));
  }
  auto [rows, dim] = rows_of(schema.name(), job->values);
  for (size_t at = 0; at < given.size(); at++) {
    auto* info = schema.arguments()[at].alias_info();
    each_tensor(given[at], at::kCPU, [&, rows = at ? at::Tensor() : rows, dim = dim](const at::Tensor& tensor) {
      job->use(tensor, info && info->isWrite(), rows, dim);
      return tensor;
    });
  }
  return job;
}

at::Tensor like_on(c10::Device device, const at::Tensor& shape) {
  return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device));
}

std::unique_ptr<Job> copy_job(const at::Tensor& target, const at::Tensor& source) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  auto job = std::make_unique<Job>(Job{op, {}, {}, {}, nullptr});
  job->use(target, true);
  job->use(source, false);
  c10::InferenceMode mode(true);
  job->values = {on_host(target), source.is_cuda() ? on_host(source) : source, false};
  return job;
}

// Gives the stream an operation, and waits for what it returns.
Stack results_now(std::unique_ptr<Job> job, const Stack& given, const std::vector<size_t>& argument_of,
                  c10::Device device) {
  void* stream = stream_on(device);
  auto answer = job->answer = std::make_shared<Answer>();
  std::string name = job->op.schema().name();
  give(std::move(job), stream, name);
  check(fake_gpu_wait(stream), name);
  if (answer->failure) std::rethrow_exception(answer->failure);
  Stack results;
  for (size_t at = 0; at < argument_of.size(); at++) {
    if (argument_of[at] != SIZE_MAX) {
      results.push_back(given[argument_of[at]]);
    } else if (answer->found[at].isTensor() && answer->found[at].toTensor().defined()) {
      at::Tensor here = answer->found[at].toTensor(), there = like_on(device, here);
      if (here.numel()) give(copy_job(there, here), stream, name);
      results.push_back(there);
    } else {
      results.push_back(answer->found[at]);
    }
  }
  return results;
}

// Gives the stream an operation; returns what will be there once it has run.
Stack results_later(std::unique_ptr<Job> job, const Stack& given, const std::vector<size_t>& argument_of,
                    c10::Device device, const Stack& shapes) {
  Stack results;
  for (size_t at = 0; at < argument_of.size(); at++) {
    at::Tensor here, there;
    if (argument_of[at] == SIZE_MAX && shapes[at].toTensor().defined()) {
      there = like_on(device, shapes[at].toTensor());
      job->use(there, true);
      c10::InferenceMode mode(true);
      here = on_host(there);
    }
    results.push_back(argument_of[at] == SIZE_MAX ? c10::IValue(there) : given[argument_of[at]]);
    job->results.push_back(here);
  }
  std::string name = job->op.schema().name();
  give(std::move(job), stream_on(device), name);
  return results;
}

void on_the_host(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  size_t first = stack->size() - op.schema().arguments().size();
  c10::Device device = device_in(*stack, first);
  Stack given(stack->begin() + int64_t(first), stack->end());
  auto argument_of = written_results(op.schema());

  Stack on_meta_device;
  for (const auto& value : given) on_meta_device.push_back(each_tensor(value, at::kMeta, on_meta));
  Stack shapes = shapes_of(op, on_meta_device, argument_of);
  bool now = shapes.empty() && !argument_of.empty();
  if (!now) resize_outputs(op.schema(), given, on_meta_device);
  auto job = job_of(op, given);
  Stack results = now ? results_now(std::move(job), given, argument_of, device)
                      : results_later(std::move(job), given, argument_of, device, shapes);
  stack->erase(stack->begin() + int64_t(first), stack->end());
  for (auto& each : results) stack->push_back(std::move(each));
}

// torch's own, but for copies on the GPU that need a kernel.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  bool on_gpu = self.is_cuda() && source.is_cuda() && self.device() == source.device();
  bool plain = self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes() &&
               self.strides() == source.strides() && self.is_non_overlapping_and_dense();
  if (!on_gpu || plain || self.numel() == 0) return at::native::copy_(self, source, non_blocking);
  give(copy_job(self, source.expand(self.sizes())), stream_on(self.device()), "aten::copy_");
  return self;
}

const std::set<std::string> KEPT = {
    "empty.memory_format", "empty_strided", "resize_",       "set_.source_Storage", "set_",
    "set_.source_Tensor",  "record_stream", "is_set_to",     "_local_scalar_dense", "_storage_use_count",
    "_pin_memory",         "is_pinned",     "copy_",         "_efficientzerotensor",
    "set_.source_Storage_storage_offset",
};

struct Registered {
  torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__};
  size_t count = 0;

  Registered() {
    struct Silent : c10::WarningHandler {
      void process(const c10::Warning&) override {}
    } silent;
    c10::WarningUtils::WarningHandlerGuard guard(&silent);  // that kernels are replaced is what we want
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNamesForDispatchKey(c10::DispatchKey::CUDA)) {
      std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
      if (full.rfind("aten::", 0) != 0) continue;
      std::string own = full.substr(6);
      if (KEPT.count(own)) continue;
      auto op = dispatcher.findOp(name);
      if (!op || !op->hasSchema()) continue;
      bool view = false;
      for (const auto& result : op->schema().returns())
        view = view || (result.alias_info() && !result.alias_info()->isWrite());
      if (view) continue;
      library.impl(own.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
      count++;
    }
    library.impl("copy_", TORCH_FN(copy_));
  }
};

Registered* registered = new Registered;

}  // namespace

// vLLM's: pinned memory as a tensor on the GPU.
at::Tensor on_gpu_view(const at::Tensor& tensor) {
  at::Tensor kept = tensor;
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .deleter([kept](void*) {})
      .options(tensor.options().device(at::kCUDA).pinned_memory(false))
      .target_device(c10::Device(at::kCUDA, c10::impl::VirtualGuardImpl(at::kCUDA).getDevice().index()))
      .make_tensor();
}

TORCH_LIBRARY_FRAGMENT(_C, library) {
  library.def("get_cuda_view_from_cpu_tensor(Tensor(a) cpu) -> Tensor(a)");
  library.impl("get_cuda_view_from_cpu_tensor", c10::DispatchKey::CPU, TORCH_FN(on_gpu_view));
}
