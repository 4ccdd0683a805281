// All that a kernel.cu uses of CUDA, but for its instructions (common/ptx.cuh): the runtime, where nvcc compiles it,
// and the emulator of csrc/simt/, where the host's compiler does. Only this header and ptx.cuh ask which of the two it
// is.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <climits>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include "simt/simt.h"
#endif

namespace dskernels {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
// What a block may have of shared memory on every GPU from sm_80 on: sm_86, sm_89 and sm_120 have no more.
constexpr int kMaxSharedBytes = 99 * 1024;
// A kernel that nobody has asked more for gets 48 KiB, static variables and dynamic memory together. So a launch asks
// from here on, which leaves the static variables of others 16 KiB.
constexpr int kAskedSharedBytes = 32 * 1024;

// Parts of dynamic shared memory begin at multiples of this, so that rows of 16 bytes can be copied to them.
constexpr int kSharedAlignment = 16;

template <class T>
constexpr __host__ __device__ int shared_bytes(int count) {
  return (count * static_cast<int>(sizeof(T)) + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
}

constexpr __host__ __device__ int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// So many blocks in one dimension.
inline dim3 grid_of(int64_t blocks) {
  if (blocks > INT_MAX) {
    throw std::runtime_error("grid: expected up to " + std::to_string(INT_MAX) + " blocks, got " +
                             std::to_string(blocks));
  }
  return dim3(static_cast<unsigned>(blocks));
}

#ifdef __CUDACC__

// A variable in the shared memory of a block, such as SIMT_SHARED(sums, float[4][32]).
#define SIMT_SHARED(name, ...) __shared__ std::type_identity_t<__VA_ARGS__> name

// Divides the dynamic shared memory of a block. All threads take the same parts in the same order; the launch asks for
// the sum of their `shared_bytes`.
class SharedCarver {
 public:
  template <class T>
  __device__ T* take(int count) {
    extern __shared__ __align__(128) unsigned char dskernels_dynamic_shared[];
    T* part = reinterpret_cast<T*>(dskernels_dynamic_shared + used_);
    used_ += shared_bytes<T>(count);
    return part;
  }

 private:
  int used_ = 0;
};

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  // Or whoever looks next would find it again.
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Runs `kernel` on the stream, a cudaStream_t. An empty grid is no launch.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, void* stream,
            const Arguments&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (shared > kAskedSharedBytes) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "shared memory");
  }
  kernel<<<grid, threads, shared, static_cast<cudaStream_t>(stream)>>>(arguments...);
  check_cuda(cudaGetLastError(), "launch");
}

// Of the current device.
inline int multiprocessors() {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

#else

#define SIMT_SHARED(name, ...)      \
  static const char name##_part{0}; \
  auto& name = *simt::static_shared<std::type_identity_t<__VA_ARGS__>>(&name##_part)

class SharedCarver {
 public:
  template <class T>
  T* take(int count) {
    return static_cast<T*>(simt::dynamic_shared(part_++, count * sizeof(T), shared_bytes<T>(count)));
  }

 private:
  int part_ = 0;
};

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, void*, const Arguments&... arguments) {
  simt::launch([&] { kernel(arguments...); }, grid, threads, shared, shared > kAskedSharedBytes);
}

inline int multiprocessors() { return simt::multiprocessors(); }

#endif

// The identity of a thread in its warp, and of a warp in its block, for blocks of one dimension.
__device__ inline int lane_index() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x) / kWarp; }

// Over each `lanes` neighbours, a power of two; all lanes of the warp call it.
__device__ inline float sum_of_lanes(float x, int lanes) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

__device__ inline float largest_of_lanes(float x, int lanes) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

template <class T>
__device__ inline float to_float(T x) {
  static_assert(!std::is_same_v<T, double>, "a float is less than a double");
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(x);
  } else {
    return x;
  }
}

// Rounded to nearest, ties to even.
template <class T>
__device__ inline T from_float(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

// Two values in 32 bits, `low` in the lower half, as the operands of the tensor cores hold them.
template <class T>
__device__ inline uint32_t pack_pair(float low, float high) {
  static_assert(sizeof(T) == 2);
  const T pair[2] = {from_float<T>(low), from_float<T>(high)};
  uint32_t bits;
  memcpy(&bits, pair, sizeof(bits));
  return bits;
}

}  // namespace dskernels
