// Kernels that each reverse kCount numbers, out[i] = in[kCount - 1 - i], and get one thing wrong where they are asked
// to be faulty: tests/test_emulator_faults.py tells what the emulator has to say of each.
#include <stdexcept>
#include <string>

#include "common/copy.cuh"
#include "common/mma.cuh"

#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))

namespace dskernels {
namespace {

constexpr int kCount = 64, kLast = kCount - 1;
// Numbers of 16 bytes.
constexpr int kVector = 4, kVectors = kCount / kVector;

using Kernel = void (*)(bool faulty, const float* in, float* out);

__global__ void missing_barrier(bool faulty, const float* in, float* out) {
  SIMT_SHARED(x, float[kCount]);
  const int t = threadIdx.x;
  x[t] = in[t];
  if (!faulty) __syncthreads();
  out[t] = x[kLast - t];
}

__global__ void missing_syncwarp(bool faulty, const float* in, float* out) {
  SIMT_SHARED(x, float[kCount / kWarp][kWarp]);
  x[warp_index()][lane_index()] = in[threadIdx.x ^ kWarp];
  if (!faulty) __syncwarp();
  out[threadIdx.x] = x[warp_index()][kWarp - 1 - lane_index()];
}

// Each of two halves of a warp syncs on its own, which orders nothing between them.
__global__ void half_syncwarp(bool faulty, const float* in, float* out) {
  SIMT_SHARED(x, float[kCount]);
  const int t = threadIdx.x, other = t ^ 31;
  x[t] = in[t];
  const unsigned half = lane_index() < 16 ? 0x0000ffffu : 0xffff0000u;
  __syncwarp(faulty ? half : kAllLanes);
  out[kLast - other] = x[other];
}

__global__ void blocks_race(bool faulty, const float* in, float* out) {
  const int t = threadIdx.x;
  if (faulty || t / kWarp == static_cast<int>(blockIdx.x)) out[t] = in[kLast - t];
}

// The last block finishes what all have left, by a counter: right, as each has fenced.
__global__ void missing_fence(bool faulty, const float* in, float* out) {
  SIMT_SHARED(is_last, bool);
  const int t = threadIdx.x;
  float* scratch = out + kCount;
  int* counter = reinterpret_cast<int*>(out + 2 * kCount);
  if (t / kWarp == static_cast<int>(blockIdx.x)) scratch[t] = in[t];
  if (!faulty) __threadfence();
  __syncthreads();
  if (t == 0) is_last = atomicAdd(counter, 1) == static_cast<int>(gridDim.x) - 1;
  __syncthreads();
  if (!is_last) return;
  if (!faulty) __threadfence();
  out[t] = scratch[kLast - t];
}

__global__ void wrong_wait_count(bool faulty, const float* in, float* out) {
  SIMT_SHARED(x, float[kCount]);
  const int t = threadIdx.x;
  for (int group = 0; group < 2; ++group) {
    const int at = group * kCount / 2 + t * kVector;
    if (t < kVectors / 2) ptx::cp_async_16(x + at, in + at);
    ptx::cp_async_commit();
  }
  if (faulty) {
    ptx::cp_async_wait<1>();
  } else {
    ptx::cp_async_wait<0>();
  }
  __syncthreads();
  const float value = x[kLast - t];
  ptx::cp_async_wait<0>();
  out[t] = value;
}

__global__ void never_waited(bool faulty, const float* in, float* out) {
  SIMT_SHARED(x, float[kCount]);
  const int t = threadIdx.x;
  if (t < kVectors) ptx::cp_async_16(x + t * kVector, in + t * kVector);
  ptx::cp_async_commit();
  if (!faulty) ptx::cp_async_wait<0>();
  __syncthreads();
  out[t] = x[kLast - t];
}

// The second half is copied to where the first is still being read.
__global__ void overwritten_target(bool faulty, const float* in, float* out) {
  SIMT_SHARED(x, float[kCount / 2]);
  const int t = threadIdx.x, from = t - kWarp;
  for (int half = 0; half < 2; ++half) {
    if (from >= 0 && from < kVectors / 2) ptx::cp_async_16(x + from * kVector, in + half * kWarp + from * kVector);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (t < kWarp) out[kLast - half * kWarp - t] = x[t];
    if (!faulty) __syncthreads();
  }
}

__global__ void overwritten_source(bool faulty, const float* in, float* out) {
  SIMT_SHARED(x, float[kCount]);
  const int t = threadIdx.x;
  float* source = out + kCount;
  source[t] = in[t];
  __syncthreads();
  if (t < kVectors) ptx::cp_async_16(x + t * kVector, source + t * kVector);
  ptx::cp_async_commit();
  if (!faulty) ptx::cp_async_wait<0>();
  if (t < kVectors) source[t * kVector] = -1.0f;
  ptx::cp_async_wait<0>();
  __syncthreads();
  out[t] = x[kLast - t];
}

__global__ void shared_out_of_bounds(bool faulty, const float* in, float* out) {
  SharedCarver carver;
  float* x = carver.take<float>(kCount);
  float* next = carver.take<float>(kCount);
  const int t = threadIdx.x;
  x[t] = next[t] = in[t];
  __syncthreads();
  out[t] = x[kLast - t + (faulty ? 1 : 0)];
}

__global__ void global_out_of_bounds(bool faulty, const float* in, float* out) {
  const int t = threadIdx.x;
  out[t] = in[kLast - t + (faulty ? 1 : 0)];
}

__global__ void uninitialised_shared(bool faulty, const float* in, float* out) {
  SIMT_SHARED(x, float[kCount]);
  const int t = threadIdx.x;
  if (!faulty || t != 7) x[t] = in[t];
  __syncthreads();
  out[t] = x[kLast - t];
}

__global__ void divergent_barrier(bool faulty, const float* in, float* out) {
  SIMT_SHARED(x, float[kCount]);
  const int t = threadIdx.x;
  x[t] = in[t];
  if (faulty && t >= kWarp) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[t] = x[kLast - t];
}

__global__ void left_before_barrier(bool faulty, const float* in, float* out) {
  SIMT_SHARED(x, float[kCount]);
  const int t = threadIdx.x;
  x[t] = in[t];
  if (faulty && t == 5) return;
  __syncthreads();
  out[t] = x[kLast - t];
}

__global__ void lanes_do_not_meet(bool faulty, const float* in, float* out) {
  const int t = threadIdx.x;
  float value = in[t];
  if (!faulty || lane_index() < 16) value = __shfl_xor_sync(kAllLanes, value, kWarp - 1);
  out[t ^ kWarp] = value;
}

__global__ void mask_without_lane(bool faulty, const float* in, float* out) {
  const int t = threadIdx.x;
  out[t ^ kWarp] = __shfl_xor_sync(faulty ? kAllLanes << 1 : kAllLanes, in[t], kWarp - 1);
}

__global__ void different_operations(bool faulty, const float* in, float* out) {
  const int t = threadIdx.x;
  float value = in[t];
  if (faulty && lane_index() < 16) {
    __ballot_sync(kAllLanes, 1);
  } else {
    value = __shfl_xor_sync(kAllLanes, value, kWarp - 1);
  }
  out[t ^ kWarp] = value;
}

// A product of 8x8, by the matrix with ones on its other diagonal; of TF32, so of few digits.
__global__ void wrong_fragment(bool faulty, const float* in, float* out) {
  if (warp_index() != 0) return;
  const int g = lane_index() / 4, t = lane_index() % 4;
  const auto one_at = [](int row, int column) { return __float_as_uint(row + column == 7 ? 1.0f : 0.0f); };
  const uint32_t a[4] = {one_at(g, t), 0, one_at(g, t + 4), 0};
  const auto x = [&](int row, int column) { return __float_as_uint(in[row * 8 + column]); };
  const uint32_t b[2] = {faulty ? x(g, t) : x(t, g), faulty ? x(g, t + 4) : x(t + 4, g)};
  float c[4] = {};
  ptx::mma_m16n8k8_tf32(c, a, b);
  out[g * 8 + 7 - 2 * t] = c[0];
  out[g * 8 + 6 - 2 * t] = c[1];
}

// The launch, see simt_fault, has half a warp too few.
__global__ void warp_not_whole(bool, const float* in, float* out) {
  float c[4] = {};
  const uint32_t a[4] = {}, b[2] = {};
  ptx::mma_m16n8k8_tf32(c, a, b);
  const int t = threadIdx.x;
  out[t] = in[kLast - t] + c[0];
}

__global__ void misaligned_ldmatrix(bool faulty, const float* in, float* out) {
  SIMT_SHARED(x, float[kVector * kWarp + kVector]);
  const int t = threadIdx.x;
  for (int i = t; i < kVector * kWarp + kVector; i += kCount) x[i] = 0.0f;
  __syncthreads();
  uint32_t r[4];
  ptx::ldmatrix_x4(r, x + kVector * lane_index() + (faulty ? 2 : 0));
  out[t] = in[kLast - t] + __uint_as_float(r[0]);
}

__global__ void misaligned_copy(bool faulty, const float* in, float* out) {
  SIMT_SHARED(x, float[kCount + kVector]);
  const int t = threadIdx.x, shift = faulty ? 1 : 0;
  if (t < kVectors) ptx::cp_async_16(x + t * kVector + shift, in + t * kVector);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  out[t] = x[kLast - t + shift];
}

__global__ void different_parts(bool faulty, const float* in, float* out) {
  SharedCarver carver;
  const int t = threadIdx.x;
  float* x = carver.take<float>(faulty && t == 40 ? kCount / 2 : kCount);
  x[t] = in[t];
  __syncthreads();
  out[t] = x[kLast - t];
}

__global__ void more_shared_than_asked(bool faulty, const float* in, float* out) {
  SharedCarver carver;
  float* x = carver.take<float>(faulty ? 2 * kCount + 1 : 2 * kCount);
  const int t = threadIdx.x;
  x[t] = in[t];
  __syncthreads();
  out[t] = x[kLast - t];
}

__global__ void more_static_shared(bool faulty, const float* in, float* out) {
  const int t = threadIdx.x;
  if (faulty) {
    SIMT_SHARED(large, float[12 * 1024 + 1]);
    large[t] = in[t];
  }
  out[t] = in[kLast - t];
}

// With what the launch gives, 512 bytes.
__global__ void static_beside_dynamic(bool faulty, const float* in, float* out) {
  const int t = threadIdx.x;
  if (faulty) {
    SIMT_SHARED(large, float[12 * 1024 - 127]);
    large[t] = in[t];
  } else {
    SIMT_SHARED(large, float[12 * 1024 - 128]);
    large[t] = in[t];
  }
  out[t] = in[kLast - t];
}

struct Case {
  const char* name;
  Kernel kernel;
};

#define CASE(kernel) {#kernel, kernel}
constexpr Case kCases[] = {
    CASE(missing_barrier),       CASE(missing_syncwarp),     CASE(half_syncwarp),          CASE(blocks_race),
    CASE(missing_fence),         CASE(wrong_wait_count),     CASE(never_waited),           CASE(overwritten_target),
    CASE(overwritten_source),    CASE(shared_out_of_bounds), CASE(global_out_of_bounds),   CASE(uninitialised_shared),
    CASE(divergent_barrier),     CASE(left_before_barrier),  CASE(lanes_do_not_meet),      CASE(mask_without_lane),
    CASE(different_operations),  CASE(wrong_fragment),       CASE(warp_not_whole),         CASE(misaligned_ldmatrix),
    CASE(misaligned_copy),       CASE(different_parts),      CASE(more_shared_than_asked), CASE(more_static_shared),
    CASE(static_beside_dynamic),
};
#undef CASE

// What has been thrown, for a caller that is not C++.
template <class F>
const char* message_of(const F& f) {
  static thread_local std::string message;
  try {
    f();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

// Nothing but a static variable.
__global__ void nothing() {
  SIMT_SHARED(place, int);
  if (threadIdx.x == 0) place = 0;
}

}  // namespace
}  // namespace dskernels

// Runs a kernel on kCount numbers, out having room for three times as many. The message of what went wrong, or null.
SIMT_EXPORT const char* simt_fault(const char* name, bool faulty, const float* in, float* out) {
  using namespace dskernels;
  return message_of([&] {
    for (const Case& each : kCases) {
      if (std::string(each.name) != name) continue;
      const bool is_of_blocks = each.kernel == blocks_race || each.kernel == missing_fence;
      const int threads = faulty && each.kernel == warp_not_whole ? kCount - 16 : kCount;
      const int shared = 2 * shared_bytes<float>(kCount);
      return launch(each.kernel, dim3(is_of_blocks ? 2 : 1), threads, shared, nullptr, faulty, in, out);
    }
    throw std::runtime_error("no such kernel");
  });
}

// A launch of a kernel that does nothing.
SIMT_EXPORT const char* simt_launch(int x, int y, int z, int threads, int shared) {
  using namespace dskernels;
  return message_of([&] { launch(nothing, dim3(x, y, z), threads, shared, nullptr); });
}

// What `grid_of` says of so many blocks.
SIMT_EXPORT const char* simt_grid_of(int64_t blocks) {
  using namespace dskernels;
  return message_of([&] { grid_of(blocks); });
}
