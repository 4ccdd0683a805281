// Copies of tiles from global to shared memory.
#pragma once

#include "common/ptx.cuh"

namespace dskernels {

// Whether rows of `columns` elements of T at multiples of `row_stride` can be copied 16 bytes at a time. Host and
// device.
template <class T>
__host__ __device__ inline bool copies_by_16(const void* data, int64_t row_stride, int64_t column_stride) {
  return column_stride == 1 && reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
         row_stride * static_cast<int64_t>(sizeof(T)) % 16 == 0;
}

// Writes shared[r][c] for r < kRows, c < kColumns: element c * column_stride of row_at(r) where r < rows and
// c < columns, else 0. kColumns is a multiple of 16 bytes, and so is kStride. By 16 bytes it is asynchronous, a part of
// the caller's cp.async group; else done when the call returns. All kThreads threads of the block call it.
template <class T, int kThreads, int kRows, int kColumns, int kStride, class RowAt>
__device__ inline void copy_tile(T* shared, const RowAt& row_at, int rows, int columns, int64_t column_stride,
                                 bool by_16) {
  constexpr int kVector = 16 / sizeof(T), kVectors = kColumns / kVector;
  static_assert(kColumns % kVector == 0 && kStride % kVector == 0);
  if (by_16) {
    for (int i = threadIdx.x; i < kRows * kVectors; i += kThreads) {
      const int row = i / kVectors, column = i % kVectors * kVector;
      const int count = row < rows ? min(max(columns - column, 0), kVector) : 0;
      // Without anything to read the address is not used, but has to be one.
      const T* from = count > 0 ? row_at(row) + column : row_at(0);
      ptx::cp_async_16(shared + row * kStride + column, from, count * static_cast<int>(sizeof(T)));
    }
    return;
  }
  for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
    const int row = i / kColumns, column = i % kColumns;
    const bool is_inside = row < rows && column < columns;
    shared[row * kStride + column] = is_inside ? row_at(row)[column * column_stride] : from_float<T>(0.0f);
  }
}

}  // namespace dskernels
