// SPDX-License-Identifier: Apache-2.0
// Kernels of torch's CUDA build on the host: for each operation of torch that has a CUDA kernel, a
// function is given to the current stream of the fake runtime that does it by the CPU's kernel, on
// CPU tensors over the same bytes. Shapes, views, allocators, streams, events and copies are torch's
// own CUDA code. What depends on data (nonzero, equal), and what torch's "meta" device does not know,
// first waits for the stream, as it does on a GPU where the host needs the answer.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <set>

extern "C" {
void* fake_gpu_alias(const void*);
int fake_gpu_enqueue(void* stream, void (*)(void*), void (*)(void*), void*, const char* name);
void fake_gpu_touch(const void*, size_t bytes, int writes);
void fake_gpu_drain(void* stream);
void fake_gpu_break(int code);
int cudaGetLastError();
}
namespace c10::cuda {  // of libc10_cuda.so
void c10_cuda_check_implementation(int32_t code, const char* file, const char* function, uint32_t line, bool);
}

namespace {

using torch::jit::Stack;

struct Used {  // a tensor on the fake GPU, by its address there
  const char* at;
  int64_t item;
  std::vector<int64_t> sizes, strides;
  bool writes;
  at::Tensor rows;  // where an operation reads or writes some rows of it only: their numbers, on the host
};

void touch(const char* at, int64_t item, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
           bool writes) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride in bytes, size
  for (size_t d = 0; d < sizes.size(); d++) {
    if (sizes[d] == 0) return;
    if (sizes[d] > 1 && strides[d] != 0) dims.emplace_back(strides[d] * item, sizes[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t run = item, count = 1;
  size_t inner = 0;
  while (inner < dims.size() && dims[inner].first == run) run *= dims[inner++].second;
  for (size_t d = inner; d < dims.size(); d++) count *= dims[d].second;
  if (count > 200000) {
    int64_t end = run;
    for (size_t d = inner; d < dims.size(); d++) end += dims[d].first * (dims[d].second - 1);
    fake_gpu_touch(at, size_t(end), writes);
    return;
  }
  std::vector<int64_t> index(dims.size(), 0);
  for (int64_t step = 0; step < count; step++) {
    int64_t offset = 0;
    for (size_t d = inner; d < dims.size(); d++) offset += index[d] * dims[d].first;
    fake_gpu_touch(at + offset, size_t(run), writes);
    for (size_t d = inner; d < dims.size(); d++) {
      if (++index[d] < dims[d].second) break;
      index[d] = 0;
    }
  }
}

void touch(const Used& used) {
  if (!used.rows.defined()) return touch(used.at, used.item, used.sizes, used.strides, used.writes);
  at::Tensor rows = used.rows.to(at::kLong).contiguous();
  std::vector<int64_t> sizes(used.sizes.begin() + 1, used.sizes.end());
  std::vector<int64_t> strides(used.strides.begin() + 1, used.strides.end());
  for (int64_t at = 0; at < rows.numel(); at++) {
    int64_t row = rows.data_ptr<int64_t>()[at];
    if (row < 0) row += used.sizes[0];
    touch(used.at + row * used.strides[0] * used.item, used.item, sizes, strides, used.writes);
  }
}

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

struct Job {
  c10::OperatorHandle op;
  Stack values;                    // on the host
  std::vector<Used> used;
  std::vector<at::Tensor> results;  // on the host: of an operation that makes new tensors

  void run() {
    c10::InferenceMode mode(true);
    for (const Used& each : used) touch(each);
    Stack stack = values;
    op.callBoxed(stack);
    for (size_t at = 0; at < results.size(); at++)
      if (results[at].defined()) results[at].copy_(stack[at].toTensor());
  }
};

void give(std::unique_ptr<Job> job, void* stream, const std::string& name) {
  auto run = [](void* what) {
    try {
      static_cast<Job*>(what)->run();
    } catch (const std::exception& error) {
      // On a GPU: a kernel that finds what it was given wrong, and all calls fail from then on.
      fprintf(stderr, "fake GPU: %s failed on the host: %.300s\n", static_cast<Job*>(what)->op.schema().name().c_str(),
              error.what());
      fake_gpu_break(710);
    }
  };
  auto drop = [](void* what) { delete static_cast<Job*>(what); };
  if (fake_gpu_enqueue(stream, run, drop, job.release(), name.c_str()))
    c10::cuda::c10_cuda_check_implementation(cudaGetLastError(), __FILE__, name.c_str(), __LINE__, false);
}

// The numbers of rows that an operation uses of its argument ``at``, on the host.
at::Tensor rows_of(const std::string& name, size_t at, const Stack& values) {
  if (at != 0 || !values[0].isTensor() || values[0].toTensor().dim() < 1) return {};
  if (name == "aten::index_select" || name == "aten::index_copy_")
    return values[1].toInt() == 0 ? values[2].toTensor() : at::Tensor();
  if (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_") {
    auto list = values[1].toList();
    if (list.empty()) return {};
    c10::IValue first = list.get(0);
    if (first.isTensor() && first.toTensor().defined() && !at::isIntegralType(first.toTensor().scalar_type(), true))
      return {};
    if (first.isTensor() && first.toTensor().defined() && first.toTensor().scalar_type() != at::kBool)
      return first.toTensor();
  }
  return {};
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

void on_the_host(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  size_t count = schema.arguments().size(), first = stack->size() - count;
  c10::Device device = device_in(*stack, first);
  void* stream = stream_on(device);
  Stack given(stack->begin() + int64_t(first), stack->end());
  auto argument_of = written_results(schema);

  // What would it make, and is it right to ask for that?
  bool now = false;
  Stack made;
  for (const auto& value : given) made.push_back(each_tensor(value, at::kMeta, on_meta));
  Stack shapes = made;
  try {
    op.callBoxed(shapes);
  } catch (const c10::NotImplementedError&) {
    now = true;
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception&) {  // a "meta" function in Python says that it cannot know
    now = true;
  }
  if (!now)
    for (size_t at = 0; at < argument_of.size(); at++)
      now = now || (argument_of[at] == SIZE_MAX && !shapes[at].isTensor());
  if (!now)  // ``out`` of another size takes the right one
    for (size_t at = 0; at < count; at++)
      if (made[at].isTensor() && given[at].isTensor() && schema.arguments()[at].alias_info() &&
          given[at].toTensor().defined() && given[at].toTensor().is_cuda() &&
          made[at].toTensor().sizes() != given[at].toTensor().sizes())
        given[at].toTensor().resize_(made[at].toTensor().sizes());

  auto job = std::make_unique<Job>(Job{op, {}, {}, {}});
  {
    c10::InferenceMode mode(true);
    for (const auto& value : given)
      job->values.push_back(each_tensor(value, at::kCPU, [](const at::Tensor& tensor) {
        return tensor.is_cuda() ? on_host(tensor) : tensor.clone();
      }));
  }
  auto use = [&](const at::Tensor& tensor, bool writes, at::Tensor rows) {
    if (tensor.defined() && tensor.is_cuda() && tensor.numel())
      job->used.push_back({static_cast<const char*>(tensor.data_ptr()), tensor.element_size(), tensor.sizes().vec(),
                           tensor.strides().vec(), writes, std::move(rows)});
  };
  for (size_t at = 0; at < count; at++) {
    auto* info = schema.arguments()[at].alias_info();
    at::Tensor rows = rows_of(schema.name(), at, job->values);
    each_tensor(given[at], at::kCPU, [&](const at::Tensor& tensor) {
      use(tensor, info && info->isWrite(), rows);
      return tensor;
    });
  }

  Stack results;
  if (now) {
    fake_gpu_drain(stream);
    c10::InferenceMode mode(true);
    Stack found = job->values;
    op.callBoxed(found);
    for (size_t at = 0; at < argument_of.size(); at++) {
      if (argument_of[at] != SIZE_MAX) {
        results.push_back(given[argument_of[at]]);
      } else if (found[at].isTensor() && found[at].toTensor().defined()) {
        at::Tensor here = found[at].toTensor();
        at::Tensor there = at::empty_strided(here.sizes(), here.strides(), here.options().device(device));
        if (here.numel()) on_host(there).copy_(here);
        results.push_back(there);
      } else {
        results.push_back(found[at]);
      }
    }
  } else {
    for (size_t at = 0; at < argument_of.size(); at++) {
      if (argument_of[at] != SIZE_MAX) {
        results.push_back(given[argument_of[at]]);
        job->results.push_back({});
        continue;
      }
      at::Tensor shape = shapes[at].toTensor();
      if (!shape.defined()) {
        results.push_back(shape);
        job->results.push_back({});
        continue;
      }
      at::Tensor there = at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device));
      use(there, true, {});
      c10::InferenceMode mode(true);
      job->results.push_back(on_host(there));
      results.push_back(there);
    }
    give(std::move(job), stream, schema.name());
  }
  stack->erase(stack->begin() + int64_t(first), stack->end());
  for (auto& each : results) stack->push_back(std::move(each));
}

// torch's own, but for copies on the GPU that need a kernel.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  bool on_gpu = self.is_cuda() && source.is_cuda() && self.device() == source.device();
  bool plain = self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes() &&
               self.strides() == source.strides() && self.is_non_overlapping_and_dense();
  if (!on_gpu || plain || self.numel() == 0) return at::native::copy_(self, source, non_blocking);
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  auto job = std::make_unique<Job>(Job{op, {}, {}, {}});
  at::Tensor wide = source.expand(self.sizes());
  auto use = [&](const at::Tensor& tensor, bool writes) {
    job->used.push_back({static_cast<const char*>(tensor.data_ptr()), tensor.element_size(), tensor.sizes().vec(),
                         tensor.strides().vec(), writes, {}});
  };
  use(self, true);
  use(wide, false);
  c10::InferenceMode mode(true);
  job->values = {on_host(self), on_host(wide), false};
  give(std::move(job), stream_on(self.device()), "aten::copy_");
  return self;
}

const std::set<std::string> KEPT = {
    "empty.memory_format", "empty_strided", "resize_",        "set_.source_Storage", "set_.source_Storage_storage_offset",
    "set_.source_Tensor",  "set_",          "record_stream",  "is_set_to",           "_local_scalar_dense",
    "_pin_memory",         "is_pinned",     "copy_",          "_efficientzerotensor", "_storage_use_count",
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

// For others who work on the host: the bytes of a tensor on the fake GPU, once all that its stream
// was given is done.
at::Tensor host_view(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  fake_gpu_drain(stream_on(tensor.device()));
  return on_host(tensor);
}

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

TORCH_LIBRARY(fake_gpu, library) { library.def("host_view", &host_view); }
