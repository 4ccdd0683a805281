// One small kernel for each wrapper of common/ptx.cuh and each fragment of common/mma.cuh, which writes all that the
// lanes of a warp get. Built for the emulator and, by nvcc alone, for the GPU that is to say whether the emulator is
// right (tests/test_ptx.py). A word is 32 bits; what belongs to a lane lies together, lane by lane.
#include "common/mma.cuh"

#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))

namespace dskernels {
namespace {

// Elements, of any type, that a lane has.
template <class T, int kCount>
__device__ void load_own(T (&own)[kCount], const T* all) {
  for (int i = 0; i < kCount; ++i) own[i] = all[kCount * lane_index() + i];
}

template <class T, int kCount>
__device__ void store_own(const T (&own)[kCount], T* all) {
  for (int i = 0; i < kCount; ++i) all[kCount * lane_index() + i] = own[i];
}

// Lane i gives the address of rows[place[i]].
__global__ void ldmatrix(const uint4* rows, const int* place, uint32_t* out, bool transposed) {
  SIMT_SHARED(tile, uint4[kWarp]);
  tile[lane_index()] = rows[lane_index()];
  __syncwarp();
  const uint4* row = &tile[place[lane_index()]];
  uint32_t r[4];
  if (transposed) {
    ptx::ldmatrix_x4_trans(r, row);
  } else {
    ptx::ldmatrix_x4(r, row);
  }
  store_own(r, out);
}

struct HalfProduct {
  using Sum = float;
  static __device__ void add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    ptx::mma_m16n8k16<__half>(c, a, b);
  }
};

struct BFloat16Product {
  using Sum = float;
  static __device__ void add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    ptx::mma_m16n8k16<__nv_bfloat16>(c, a, b);
  }
};

struct Tf32Product {
  using Sum = float;
  static __device__ void add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    ptx::mma_m16n8k8_tf32(c, a, b);
  }
};

struct Int8Product {
  using Sum = int32_t;
  static __device__ void add(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    ptx::mma_m16n8k32_s8(c, a, b);
  }
};

template <class Product>
__global__ void mma(const uint32_t* a, const uint32_t* b, const typename Product::Sum* c, typename Product::Sum* out) {
  uint32_t own_a[4], own_b[2];
  typename Product::Sum own_c[4];
  load_own(own_a, a);
  load_own(own_b, b);
  load_own(own_c, c);
  Product::add(own_c, own_a, own_b);
  store_own(own_c, out);
}

// Two groups of a line of 16 bytes a lane, of which the first has bytes[lane] to copy; each is read by a neighbour when
// it has been waited for, the first while the second may still be under way.
__global__ void cp_async(const uint4* lines, const int* bytes, uint4* out) {
  SIMT_SHARED(copied, uint4[2][kWarp]);
  const int lane = lane_index();
  for (int group = 0; group < 2; ++group) copied[group][lane] = make_uint4(~0u, ~0u, ~0u, ~0u);
  __syncthreads();
  ptx::cp_async_16(&copied[0][lane], &lines[lane], bytes[lane]);
  ptx::cp_async_commit();
  ptx::cp_async_16(&copied[1][lane], &lines[kWarp + lane]);
  ptx::cp_async_commit();
  ptx::cp_async_wait<1>();
  __syncwarp();
  out[lane ^ 1] = copied[0][lane ^ 1];
  ptx::cp_async_wait<0>();
  __syncwarp();
  out[kWarp + (lane ^ 1)] = copied[1][lane ^ 1];
}

// out[0][n] and out[1][n] of x[n].
__global__ void functions(const float* x, uint32_t* out, int count) {
  for (int i = threadIdx.x; i < count; i += kWarp) {
    out[i] = __float_as_uint(ptx::exp2_approximate(x[i]));
    out[count + i] = ptx::to_tf32(x[i]);
  }
}

// out[kTables][32] of the words x[3][32].
template <int... kTables>
__global__ void lop3(const uint32_t* x, uint32_t* out) {
  const int lane = lane_index();
  int row = 0;
  ((out[kWarp * row++ + lane] = ptx::lop3<kTables>(x[lane], x[kWarp + lane], x[2 * kWarp + lane])), ...);
}

enum Fragment : int { kA, kATransposed, kBTransposed, kB };

// The fragments of tile[16][16]: of its first kDepth columns, or, where rows are the depth, of its first kDepth rows.
template <class T>
__global__ void load_fragment(const T* tile, uint32_t* out, int fragment) {
  constexpr int kSize = 16, kStride = kSize + Mma<T>::kPad;
  SIMT_SHARED(shared, T[kSize * kStride]);
  for (int i = lane_index(); i < kSize * kSize; i += kWarp) shared[i / kSize * kStride + i % kSize] = tile[i];
  __syncwarp();
  if (fragment == kA || fragment == kATransposed) {
    typename Mma<T>::A a;
    if (fragment == kA) {
      load_a<T>(a, shared, kStride);
    } else {
      load_a_transposed<T>(a, shared, kStride);
    }
    memcpy(out + sizeof(a) / 4 * lane_index(), &a, sizeof(a));
  } else {
    typename Mma<T>::B b[2];
    if (fragment == kB) {
      load_b<T>(b, shared, kStride);
    } else {
      load_b_transposed<T>(b, shared, kStride);
    }
    memcpy(out + sizeof(b) / 4 * lane_index(), &b, sizeof(b));
  }
}

// The A that the accumulators c[kDepth / 8][32][4] become.
template <class T>
__global__ void accumulators(const float* c, uint32_t* out) {
  float own[Mma<T>::kDepth / 8][4];
  for (int j = 0; j < Mma<T>::kDepth / 8; ++j) load_own(own[j], c + 4 * kWarp * j);
  typename Mma<T>::A a;
  accumulators_as_a<T>(a, own);
  memcpy(out + sizeof(a) / 4 * lane_index(), &a, sizeof(a));
}

template <class... Parameters, class... Arguments>
void run(void (*kernel)(Parameters...), const Arguments&... arguments) {
  launch(kernel, dim3(1), kWarp, 0, nullptr, arguments...);
}

template <class Product>
void run_mma(const uint32_t* a, const uint32_t* b, const void* c, void* out) {
  using Sum = typename Product::Sum;
  run(mma<Product>, a, b, static_cast<const Sum*>(c), static_cast<Sum*>(out));
}

// Types of elements as the tests number them.
enum Type : int { kHalf, kBFloat, kFloat, kInt8 };

}  // namespace
}  // namespace dskernels

SIMT_EXPORT void ptx_ldmatrix(const void* rows, const int* place, uint32_t* out, bool transposed) {
  dskernels::run(dskernels::ldmatrix, static_cast<const uint4*>(rows), place, out, transposed);
}

SIMT_EXPORT void ptx_mma(const uint32_t* a, const uint32_t* b, const void* c, void* out, int type) {
  using namespace dskernels;
  switch (type) {
    case kHalf: return run_mma<HalfProduct>(a, b, c, out);
    case kBFloat: return run_mma<BFloat16Product>(a, b, c, out);
    case kFloat: return run_mma<Tf32Product>(a, b, c, out);
    default: return run_mma<Int8Product>(a, b, c, out);
  }
}

SIMT_EXPORT void ptx_cp_async(const void* lines, const int* bytes, void* out) {
  dskernels::run(dskernels::cp_async, static_cast<const uint4*>(lines), bytes, static_cast<uint4*>(out));
}

SIMT_EXPORT void ptx_functions(const float* x, uint32_t* out, int count) {
  dskernels::run(dskernels::functions, x, out, count);
}

SIMT_EXPORT void ptx_lop3(const uint32_t* x, uint32_t* out) {
  dskernels::run(dskernels::lop3<0x00, 0x01, 0x40, 0x6a, 0x96, 0xca, 0xea, 0xf8>, x, out);
}

SIMT_EXPORT void ptx_load(const void* tile, uint32_t* out, int fragment, int type) {
  using namespace dskernels;
  if (type == kFloat) return run(load_fragment<float>, static_cast<const float*>(tile), out, fragment);
  if (type == kHalf) return run(load_fragment<__half>, static_cast<const __half*>(tile), out, fragment);
  run(load_fragment<__nv_bfloat16>, static_cast<const __nv_bfloat16*>(tile), out, fragment);
}

SIMT_EXPORT void ptx_accumulators(const float* c, uint32_t* out, int type) {
  using namespace dskernels;
  if (type == kFloat) return run(accumulators<float>, c, out);
  if (type == kHalf) return run(accumulators<__half>, c, out);
  run(accumulators<__nv_bfloat16>, c, out);
}
