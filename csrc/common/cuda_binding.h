// What every CUDA binding needs beyond common/binding.h: the device and stream of its tensors, and its place among
// torch's operators. With DSKERNELS_SIMT it binds the emulator, to tensors on the CPU.
#pragma once

#include "common/binding.h"

#ifndef DSKERNELS_SIMT
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#endif

namespace dskernels {

#ifdef DSKERNELS_SIMT

class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& t) { STD_TORCH_CHECK(t.is_cpu(), "the emulator: expected tensors on the CPU"); }
  void* stream() const { return nullptr; }
};

// Whose tensors the operators of backend "cuda" take.
#define DSKERNELS_CUDA_KEY CPU

// Registers by `add(library)` what serves backend "cuda".
#define DSKERNELS_CUDA_OPERATORS(add) \
  STABLE_TORCH_LIBRARY_IMPL(dskernels_cuda, DSKERNELS_CUDA_KEY, m) { add(m); }

#else

// Makes the device of a tensor the current one while it lives.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& t) : device_(t.get_device_index()), guard_(device_) {}

  // A cudaStream_t, torch's current one on that device.
  void* stream() const {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    return stream;
  }

 private:
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
};

#define DSKERNELS_CUDA_KEY CUDA

// Operators of their own for the backend, and the kernels of the operators that exported programs hold.
#define DSKERNELS_CUDA_OPERATORS(add)                                          \
  STABLE_TORCH_LIBRARY_IMPL(dskernels_cuda, DSKERNELS_CUDA_KEY, m) { add(m); } \
  STABLE_TORCH_LIBRARY_IMPL(dskernels, CUDA, m) { add(m); }

#endif

}  // namespace dskernels
