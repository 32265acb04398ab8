// SPDX-License-Identifier: Apache-2.0
// Which bytes of the fake GPU a kernel touches: all of each tensor's, or some rows of it only.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>
#include <vector>

extern "C" void fake_gpu_touch(const void*, size_t bytes, int writes);

namespace fake_gpu {

// A tensor on the fake GPU, by its address there.
struct Used {
  const char* at = nullptr;
  int64_t item = 1;
  std::vector<int64_t> sizes, strides;
  bool writes = false;
  at::Tensor rows;  // numbers, on the host, along ``dim``: only these are touched. Undefined: all is
  int64_t dim = 0;

  static Used of(const at::Tensor& tensor, bool writes) {
    Used used;
    used.at = static_cast<const char*>(tensor.data_ptr());
    used.item = tensor.element_size();
    used.sizes = tensor.sizes().vec();
    used.strides = tensor.strides().vec();
    used.writes = writes;
    return used;
  }
};

// More pieces than this are told as one from the first byte to the last.
constexpr int64_t MOST_PIECES = 200000;

inline void touch(const char* at, int64_t item, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                  bool writes) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride in bytes, size
  for (size_t d = 0; d < sizes.size(); d++) {
    if (sizes[d] == 0) return;
    if (sizes[d] > 1 && strides[d] != 0) dims.emplace_back(strides[d] * item, sizes[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t run = item, count = 1;  // bytes that lie together, and how many such runs there are
  size_t inner = 0;
  while (inner < dims.size() && dims[inner].first == run) run *= dims[inner++].second;
  for (size_t d = inner; d < dims.size(); d++) count *= dims[d].second;
  if (count > MOST_PIECES) {
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

inline void touch(const Used& used) {
  if (!used.rows.defined()) return touch(used.at, used.item, used.sizes, used.strides, used.writes);
  at::Tensor rows = used.rows.to(at::kLong).contiguous();
  auto sizes = used.sizes, strides = used.strides;
  sizes.erase(sizes.begin() + used.dim);
  strides.erase(strides.begin() + used.dim);
  int64_t many = used.sizes[size_t(used.dim)], apart = used.strides[size_t(used.dim)] * used.item;
  for (int64_t at = 0; at < rows.numel(); at++) {
    int64_t row = rows.data_ptr<int64_t>()[at];
    if (row < 0) row += many;
    if (row < 0 || row >= many) continue;  // the operation itself refuses it
    touch(used.at + row * apart, used.item, sizes, strides, used.writes);
  }
}

}  // namespace fake_gpu
