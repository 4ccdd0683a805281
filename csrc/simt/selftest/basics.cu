// Kernels by which the emulator's tests (tests/test_emulator.py) try the emulator itself.
#include "common/copy.cuh"
#include "common/mma.cuh"

#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))

namespace dskernels {
namespace {

constexpr int kRows = 64, kColumns = 64, kThreads = 128;

// out = a b^T for row-major [64, 64].
template <class T>
__global__ void __launch_bounds__(kThreads) product(const T* a, const T* b, float* out) {
  constexpr int kStride = kColumns + Mma<T>::kPad;
  SharedCarver carver;
  T* a_tile = carver.take<T>(kRows * kStride);
  T* b_tile = carver.take<T>(kRows * kStride);
  const auto row_of = [](const T* x) { return [x](int row) { return x + row * kColumns; }; };
  copy_tile<T, kThreads, kRows, kColumns, kStride>(a_tile, row_of(a), kRows, kColumns, 1, true);
  copy_tile<T, kThreads, kRows, kColumns, kStride>(b_tile, row_of(b), kRows, kColumns, 1, true);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();

  float c[kColumns / 8][4] = {};
#pragma unroll
  for (int k = 0; k < kColumns; k += Mma<T>::kDepth) {
    typename Mma<T>::A left;
    load_a<T>(left, a_tile + 16 * warp_index() * kStride + k, kStride);
#pragma unroll
    for (int n = 0; n < kColumns / 8; n += 2) {
      typename Mma<T>::B right[2];
      load_b_transposed<T>(right, b_tile + 8 * n * kStride + k, kStride);
      multiply<T>(c[n], left, right[0]);
      multiply<T>(c[n + 1], left, right[1]);
    }
  }
  const int row = 16 * warp_index() + lane_index() / 4, column = 2 * (lane_index() % 4);
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[(row + 8 * (i / 2)) * kColumns + 8 * n + column + i % 2] = c[n][i];
  }
}

template <class T>
void run_product(const void* a, const void* b, float* out) {
  constexpr int kBytes = 2 * shared_bytes<T>(kRows * (kColumns + Mma<T>::kPad));
  launch(product<T>, dim3(1), kThreads, kBytes, nullptr, static_cast<const T*>(a), static_cast<const T*>(b), out);
}

}  // namespace
}  // namespace dskernels

SIMT_EXPORT void simt_product(const void* a, const void* b, float* out, int bytes, bool half) {
  using namespace dskernels;
  if (bytes == 4) return run_product<float>(a, b, out);
  half ? run_product<__half>(a, b, out) : run_product<__nv_bfloat16>(a, b, out);
}
