// The norm of gradients and their scaling: one launch a pass, with a block for each chunk of memory, whatever its type.
//
// Sums have float64's range and float32's speed: of every four elements float32 takes the powers, after all of them
// have been multiplied by a power of two that brings the largest near 1, and float64 takes their sum, times that power
// of two undone. Neither multiplication rounds, nothing overflows, and what underflows is too small to count in its
// group. The group's rounding is within 3 units of float32, and has no direction, so that a norm over many groups is as
// good as one summed in float64, at a quarter of its conversions and additions: those of an sm_86 or sm_89 do a 64th of
// float32's work in a cycle, and would take longer than the memory of 16-bit gradients. Blue's three accumulators
// (netlib's dnrm2) have the same range, but choose among them for every element. The largest element, found as an
// integer, tells of NaN and infinity as well. For powers but 1, 2 and 3, and of float64, all is float64.
#include <cmath>

#include "clip_and_scale/cuda.h"
#include "common/cuda.cuh"

namespace dskernels {
namespace {

constexpr int kThreads = 256;
// Elements of a group.
constexpr int kGroup = 4;
// Loads of 16 bytes that a thread has under way.
constexpr int kLoads = 4;
constexpr unsigned kInfinity = 0x7f800000;

// 2^exponent, of a normal number.
__device__ inline double power_of_two(int exponent) {
  const uint64_t bits = static_cast<uint64_t>(1023 + exponent) << 52;
  double result;
  memcpy(&result, &bits, sizeof(result));
  return result;
}

template <NormKind kKind>
__device__ inline float sum_of_powers(const float (&x)[kGroup]) {
  if constexpr (kKind == NormKind::kSum) {
    return (x[0] + x[1]) + (x[2] + x[3]);
  } else if constexpr (kKind == NormKind::kSumOfSquares) {
    return fmaf(x[1], x[1], x[0] * x[0]) + fmaf(x[3], x[3], x[2] * x[2]);
  } else {
    return fmaf(x[1] * x[1], x[1], x[0] * x[0] * x[0]) + fmaf(x[3] * x[3], x[3], x[2] * x[2] * x[2]);
  }
}

// Adds a group to what a thread has.
template <NormKind kKind>
__device__ inline void add(NormPart& part, const float (&x)[kGroup], double power) {
  float magnitude[kGroup];
  // Numbers without sign are in the order of their bits; infinity is above them, and NaN above it.
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    magnitude[i] = fabsf(x[i]);
    largest = max(largest, __float_as_uint(magnitude[i]));
  }
  part.has_nonfinite |= largest >= kInfinity;
  if constexpr (kKind == NormKind::kMaximum) {
    // fmaxf passes by a NaN.
    const float of_group = fmaxf(fmaxf(magnitude[0], magnitude[1]), fmaxf(magnitude[2], magnitude[3]));
    part.sum = fmax(part.sum, static_cast<double>(of_group));
  } else if constexpr (kKind == NormKind::kSumOfPowers) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) part.sum += pow(static_cast<double>(magnitude[i]), power);
  } else {
    constexpr int kDegree = kKind == NormKind::kSum ? 1 : kKind == NormKind::kSumOfSquares ? 2 : 3;
    // The exponent's field of a factor that brings the largest to between 1 and 4; 0 and subnormal ones below that.
    const int field = max(254 - static_cast<int>(largest >> 23), 1);
    const float scale = __uint_as_float(static_cast<unsigned>(field) << 23);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) magnitude[i] *= scale;
    part.sum += static_cast<double>(sum_of_powers<kKind>(magnitude)) * power_of_two(kDegree * (127 - field));
  }
}

template <NormKind kKind>
__device__ inline void add(NormPart& part, double x, double power) {
  const double magnitude = fabs(x);
  part.has_nonfinite |= !(magnitude < INFINITY);
  if constexpr (kKind == NormKind::kMaximum) {
    part.sum = fmax(part.sum, magnitude);
  } else if constexpr (kKind == NormKind::kSum) {
    part.sum += magnitude;
  } else if constexpr (kKind == NormKind::kSumOfSquares) {
    part.sum += magnitude * magnitude;
  } else if constexpr (kKind == NormKind::kSumOfCubes) {
    part.sum += magnitude * magnitude * magnitude;
  } else {
    part.sum += pow(magnitude, power);
  }
}

// Adds kCount elements.
template <NormKind kKind, class T, int kCount>
__device__ inline void add_all(NormPart& part, const T (&x)[kCount], double power) {
  if constexpr (std::is_same_v<T, double>) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) add<kKind>(part, x[i], power);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += kGroup) {
      const float group[kGroup] = {to_float(x[i]), to_float(x[i + 1]), to_float(x[i + 2]), to_float(x[i + 3])};
      add<kKind>(part, group, power);
    }
  }
}

// 16 bytes of a chunk.
template <class T>
struct Vector {
  static constexpr int kElements = 16 / sizeof(T);
  T x[kElements];
};

template <class T>
__device__ inline Vector<T> vector_of(const uint4& bits) {
  Vector<T> vector;
  memcpy(&vector, &bits, sizeof(bits));
  return vector;
}

// How many vectors a chunk begins with; none if they cannot be loaded as such.
template <class T>
__device__ inline int vectors_of(const Run& chunk) {
  const bool is_aligned = chunk.stride == 1 && reinterpret_cast<uintptr_t>(chunk.data) % sizeof(uint4) == 0;
  return is_aligned ? static_cast<int>(chunk.count) / Vector<T>::kElements : 0;
}

// The part of a thread of what a block adds up. An address from a table might be in shared memory, for all that the
// compiler knows; __ldg says that it is not, and so do __ldcg and __stcg below.
template <NormKind kKind, class T>
__device__ NormPart read_chunk(const Run& chunk, double power) {
  const T* x = static_cast<const T*>(chunk.data);
  const int count = static_cast<int>(chunk.count), vectors = vectors_of<T>(chunk);
  NormPart part{0.0, false};
  for (int first = threadIdx.x; first < vectors; first += kLoads * kThreads) {
    uint4 bits[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = first + i * kThreads;
      bits[i] = at < vectors ? __ldg(reinterpret_cast<const uint4*>(x) + at) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) add_all<kKind>(part, vector_of<T>(bits[i]).x, power);
  }
  for (int first = vectors * Vector<T>::kElements + threadIdx.x; first < count; first += kGroup * kThreads) {
    T group[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int at = first + i * kThreads;
      group[i] = at < count ? __ldg(x + at * chunk.stride) : static_cast<T>(0.0f);
    }
    add_all<kKind>(part, group, power);
  }
  return part;
}

template <class T>
__device__ inline T scaled(T x, double factor) {
  if constexpr (std::is_same_v<T, double>) {
    return x * factor;
  } else {
    return from_float<T>(to_float(x) * static_cast<float>(factor));
  }
}

template <class T>
__device__ inline uint4 scaled_vector(uint4 bits, double factor) {
  Vector<T> vector = vector_of<T>(bits);
#pragma unroll
  for (int i = 0; i < Vector<T>::kElements; ++i) vector.x[i] = scaled(vector.x[i], factor);
  memcpy(&bits, &vector, sizeof(bits));
  return bits;
}

template <class T>
__device__ void scale_chunk(const Run& chunk, double factor) {
  T* x = static_cast<T*>(chunk.data);
  const int count = static_cast<int>(chunk.count), vectors = vectors_of<T>(chunk);
  for (int first = threadIdx.x; first < vectors; first += kLoads * kThreads) {
    uint4 bits[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = first + i * kThreads;
      if (at < vectors) bits[i] = __ldcg(reinterpret_cast<const uint4*>(x) + at);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = first + i * kThreads;
      if (at < vectors) __stcg(reinterpret_cast<uint4*>(x) + at, scaled_vector<T>(bits[i], factor));
    }
  }
  for (int at = vectors * Vector<T>::kElements + threadIdx.x; at < count; at += kThreads) {
    T& each = x[at * chunk.stride];
    each = scaled(each, factor);
  }
}

// What f(an element of the type) returns.
template <class F>
__device__ inline auto with_type(RunType type, const F& f) {
  switch (type) {
    case RunType::kBFloat16: return f(__nv_bfloat16{});
    case RunType::kFloat16: return f(__half{});
    case RunType::kFloat64: return f(double{});
    default: return f(float{});
  }
}

template <class T>
__device__ inline double to_double(T x) {
  if constexpr (std::is_same_v<T, double>) {
    return x;
  } else {
    return to_float(x);
  }
}

template <bool kIsMaximum>
__device__ inline double joined(double a, double b) {
  return kIsMaximum ? fmax(a, b) : a + b;
}

// What all threads of a block have together, in an order that is always the same; in the first warp alone.
template <bool kIsMaximum>
__device__ NormPart of_block(NormPart part) {
  SIMT_SHARED(sums, double[kThreads / kWarp]);
  double sum = part.sum;
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    sum = joined<kIsMaximum>(sum, __shfl_xor_sync(kAllLanes, sum, lanes));
  }
  if (lane_index() == 0) sums[warp_index()] = sum;
  // A barrier, too.
  const bool has_nonfinite = __syncthreads_or(part.has_nonfinite) != 0;
  sum = 0.0;
  if (warp_index() == 0) {
#pragma unroll
    for (int warp = 0; warp < kThreads / kWarp; ++warp) sum = joined<kIsMaximum>(sum, sums[warp]);
  }
  return {sum, has_nonfinite};
}

// rows[b] of chunk b, as power_sums_cuda says. A block a chunk; bound by the reading of the chunks.
template <NormKind kKind>
__global__ void __launch_bounds__(kThreads) power_sums(const Run* chunks, double power, double (*rows)[2]) {
  const Run chunk = chunks[blockIdx.x];
  const NormPart own =
      with_type(chunk.type, [&](auto element) { return read_chunk<kKind, decltype(element)>(chunk, power); });
  const NormPart part = of_block<kKind == NormKind::kMaximum>(own);
  if (threadIdx.x == 0) {
    rows[blockIdx.x][0] = part.sum;
    rows[blockIdx.x][1] = part.has_nonfinite ? 1.0 : 0.0;
  }
}

// As clip_factor_cuda says. One block: a row for every 32768 elements is soon read.
template <bool kIsMaximum>
__global__ void __launch_bounds__(kThreads) clip_factor(FactorArgs args) {
  NormPart own{0.0, false};
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < args.count; i += kThreads) {
    own.sum = joined<kIsMaximum>(own.sum, args.rows[i][0]);
    own.has_nonfinite |= args.rows[i][1] != 0.0;
  }
  const NormPart part = of_block<kIsMaximum>(own);
  if (threadIdx.x != 0) return;
  double norm = part.sum;
  if constexpr (kIsMaximum) {
    // A maximum does not tell a NaN; the other sums do.
    if (part.has_nonfinite && norm < INFINITY) norm = NAN;
  } else if (args.kind == NormKind::kSumOfSquares) {
    norm = sqrt(norm);
  } else if (args.kind != NormKind::kSum) {
    norm = pow(norm, 1.0 / args.power);
  }
  double loss_scale = args.loss_scale;
  if (args.loss_scale_data != nullptr) {
    loss_scale = with_type(args.loss_scale_type, [&](auto element) {
      return to_double(*static_cast<const decltype(element)*>(args.loss_scale_data));
    });
  }
  norm /= loss_scale;
  *args.norm = static_cast<float>(norm);
  *args.found_inf = part.has_nonfinite ? 1.0f : 0.0f;
  // 1e-6 as in torch.nn.utils.clip_grad_norm_.
  const double factor = fmin(args.max_norm / (norm + 1e-6), 1.0) / loss_scale;
  *args.factor = part.has_nonfinite ? 1.0 : factor;
}

// As scale_cuda says. A block a chunk, bound by the reading and writing of the chunks.
__global__ void __launch_bounds__(kThreads) scale(const Run* chunks, const double* factor) {
  const double by = *factor;
  if (by == 1.0) return;
  const Run chunk = chunks[blockIdx.x];
  with_type(chunk.type, [&](auto element) { scale_chunk<decltype(element)>(chunk, by); });
}

}  // namespace

void power_sums_cuda(const Run* chunks, int64_t count, NormKind kind, double power, double (*rows)[2], void* stream) {
  const auto run = [&](auto kernel) {
    launch(kernel, dim3(static_cast<unsigned>(count)), kThreads, 0, stream, chunks, power, rows);
  };
  switch (kind) {
    case NormKind::kSum: return run(power_sums<NormKind::kSum>);
    case NormKind::kSumOfSquares: return run(power_sums<NormKind::kSumOfSquares>);
    case NormKind::kSumOfCubes: return run(power_sums<NormKind::kSumOfCubes>);
    case NormKind::kMaximum: return run(power_sums<NormKind::kMaximum>);
    case NormKind::kSumOfPowers: return run(power_sums<NormKind::kSumOfPowers>);
  }
}

void clip_factor_cuda(const FactorArgs& args, void* stream) {
  launch(args.kind == NormKind::kMaximum ? clip_factor<true> : clip_factor<false>, dim3(1), kThreads, 0, stream, args);
}

void scale_cuda(const Run* chunks, int64_t count, const double* factor, void* stream) {
  launch(scale, dim3(static_cast<unsigned>(count)), kThreads, 0, stream, chunks, factor);
}

}  // namespace dskernels
