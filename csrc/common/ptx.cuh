// The instructions that C++ has no words for, each as PTX and, for the host, as what PTX's manual says it does.
// Fragments are laid out over the lanes of a warp as in the PTX ISA, section "Matrix multiply-accumulate operation
// using mma instruction"; g is lane / 4 and t is lane % 4 below. All lanes of a warp call the warp-wide ones.
#pragma once

#include "common/cuda.cuh"

namespace dskernels::ptx {

#ifdef __CUDACC__

__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Four 8x8 matrices of 16-bit elements: lanes 8i to 8i+7 give the addresses of the rows (16 bytes, so aligned) of
// matrix i; a lane gets elements 2t and 2t+1 of row g of each.
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same of the transposed matrices: a lane gets rows 2t and 2t+1 of column g of each.
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// c[16][8] += a[16][16] * b[16][8]: a[0] holds columns 2t, 2t+1 of row g, a[1] of row g+8, a[2] and a[3] columns 8
// further; b[0] rows 2t, 2t+1 of column g, b[1] rows 8 further; c[0], c[1] columns 2t, 2t+1 of row g, c[2], c[3] of
// row g+8.
template <class T>
__device__ inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// c[16][8] += a[16][8] * b[8][8] of TF32: a[0] holds column t of row g, a[1] of row g+8, a[2] and a[3] column t+4;
// b[0] row t of column g, b[1] row t+4.
__device__ inline void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c[16][8] += a[16][32] * b[32][8] of int8, exact: a[0] holds columns 4t to 4t+3 of row g, a[1] of row g+8, a[2] and
// a[3] columns 16 further; b[0] rows 4t to 4t+3 of column g, b[1] rows 16 further.
__device__ inline void mma_m16n8k32_s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Copies `bytes` (0 to 16) to shared memory and fills up to 16 with zeros; both addresses multiples of 16. There when
// its group has been waited for, and for other threads after a barrier that follows.
__device__ inline void cp_async_16(void* shared, const void* global, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
}

// Makes a group of the copies since the last one.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread but the last kPending.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 2 ** x, to 2 units in the last place; results below 2 ** -126 are 0.
__device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x rounded to TF32, 10 bits after the point, ties away from zero; the bits of a float.
__device__ inline uint32_t to_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

// The bitwise function whose truth table is kTable, of a = 0xf0, b = 0xcc and c = 0xaa.
template <int kTable>
__device__ inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(result) : "r"(a), "r"(b), "r"(c), "n"(kTable));
  return result;
}

#else

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) { simt::ldmatrix_x4(r, row, false); }

inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) { simt::ldmatrix_x4(r, row, true); }

template <class T>
inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
  simt::mma_m16n8k16(c, a, b, std::is_same_v<T, __half>);
}

inline void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  simt::mma_m16n8k8_tf32(c, a, b);
}

inline void mma_m16n8k32_s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  simt::mma_m16n8k32_s8(c, a, b);
}

inline void cp_async_16(void* shared, const void* global, int bytes = 16) { simt::cp_async_16(shared, global, bytes); }

inline void cp_async_commit() { simt::cp_async_commit(); }

template <int kPending>
inline void cp_async_wait() {
  simt::cp_async_wait(kPending);
}

inline float exp2_approximate(float x) { return x < -126.0f ? 0.0f : exp2f(x); }

inline uint32_t to_tf32(float x) {
  const uint32_t bits = __float_as_uint(x);
  // Without the lower bits of a NaN infinity might be left.
  if (x != x) return bits | 0x7fffe000u;
  const bool is_finite = (bits & 0x7f800000u) != 0x7f800000u;
  return (is_finite ? bits + 0x1000u : bits) & ~0x1fffu;
}

template <int kTable>
inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result = 0;
  for (int row = 0; row < 8; ++row) {
    if ((kTable >> row & 1) != 0) result |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
  }
  return result;
}

#endif

}  // namespace dskernels::ptx
