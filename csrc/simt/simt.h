// Runs CUDA kernels on the CPU, for tests: the kernel's source, unchanged, compiled by the host's compiler.
//
// The threads of a block are fibers of one thread of the system. They go on in turn, in an order that a test chooses,
// each until it has to wait: at a barrier for the block, at a warp-wide operation for its lanes. Shared memory begins
// as bytes of 0xff, NaN in every floating-point type. An asynchronous copy is made as late as the rules allow, as
// early, or either way from copy to copy. What hardware would leave undefined is an error that names the place: lanes
// that do not meet, a barrier that a thread has left, copies that nobody waits for, a launch that no GPU takes.
//
// Accesses out of bounds show under AddressSanitizer: every part of shared memory is an allocation of its own. Races
// show under ThreadSanitizer: for it, every fiber is a thread, and only barriers, __syncwarp, fences and the ends of
// launches order their accesses, atomics being no race. To this end the kernels and this header are instrumented, and
// what is compiled apart is not. A fence orders all that have passed one, which may hide a race of a kernel that
// fences.
//
// What it cannot show: weak ordering of memory, approximate functions, time. That the instructions do what is written
// here is for a GPU to say (tests/test_ptx.py).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#include "simt/device.h"

namespace dskernels::simt {

// The order in which threads and blocks go on, and when asynchronous copies are made.
enum class Order : int { kForward, kReverse, kRandom };
enum class Copies : int { kLate, kEarly, kMixed };

// Runs `thread` for every thread of every block. `asked`: whether the kernel may have more than 48 KiB of shared
// memory. Throws std::runtime_error where the kernel breaks a rule.
void launch(const std::function<void()>& thread, dim3 grid, int threads, int shared_bytes, bool asked);

// Of the GPU that is played.
int multiprocessors();

// Ends the launch with an error that names the thread.
[[noreturn]] void fail(const char* message, const char* file = __builtin_FILE(), int line = __builtin_LINE());

// Memory of the block that the thread is in, by the address of something that stands for the variable.
void* static_shared_bytes(const void* key, size_t bytes);
// Part number `part` of the dynamic shared memory; `rounded` counts against what the launch asked for.
void* dynamic_shared(int part, size_t bytes, size_t rounded);

template <class T>
T* static_shared(const void* key) {
  return static_cast<T*>(static_shared_bytes(key, sizeof(T)));
}

void barrier(const char* file, int line);
// The sum over the block of `value`, with a barrier.
int barrier_count(int value, const char* file, int line);

// Waits for the lanes of `mask`; the last that comes calls `compute` with what each of them has deposited.
using Compute = void (*)(void* const* lanes, unsigned mask);
void meet(unsigned mask, void* mine, Compute compute, const char* operation);
// The same for all lanes of a warp, which has to be whole.
void meet_all(void* mine, Compute compute, const char* operation);
void sync_warp(unsigned mask);
void fence();

uint64_t shuffle(unsigned mask, uint64_t value, int source);
unsigned ballot(unsigned mask, bool vote);
int lane();

// Fragments as in common/ptx.cuh; `row` is copied by the lane, so that a race for it is seen.
void ldmatrix_rows_x4(uint32_t (&r)[4], const uint32_t (&row)[4], bool transposed);
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool half);
void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void mma_m16n8k32_s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, bool transposed) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) fail("ldmatrix: a row that is not aligned to 16 bytes");
  uint32_t own[4];
  memcpy(own, row, sizeof(own));
  ldmatrix_rows_x4(r, own, transposed);
}

struct Copy {
  void* shared;
  const void* global;
  int bytes;
};

// Whether the next copy is made at once.
bool copies_now();
void remember(const Copy& copy);
void cp_async_commit();
// Takes the copies of all groups but the last `pending`, one after the other.
bool next_copy(int pending, Copy& copy);

inline void make(const Copy& copy) {
  unsigned char line[16] = {};
  memcpy(line, copy.global, copy.bytes);
  memcpy(copy.shared, line, sizeof(line));
}

inline void cp_async_16(void* shared, const void* global, int bytes) {
  const bool reads = bytes > 0;
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0 || (reads && reinterpret_cast<uintptr_t>(global) % 16 != 0)) {
    fail("cp.async: an address that is not aligned to 16 bytes");
  }
  if (bytes < 0 || bytes > 16) fail("cp.async: expected 0 to 16 bytes");
  if (copies_now()) return make({shared, global, bytes});
  memset(shared, 0xff, 16);
  remember({shared, global, bytes});
}

inline void cp_async_wait(int pending) {
  for (Copy copy; next_copy(pending, copy);) make(copy);
}

}  // namespace dskernels::simt

namespace simt = dskernels::simt;

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  simt::barrier(file, line);
}

inline int __syncthreads_count(int predicate, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return simt::barrier_count(predicate != 0, file, line);
}

inline int __syncthreads_or(int predicate, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return simt::barrier_count(predicate != 0, file, line) != 0;
}

inline void __syncwarp(unsigned mask = 0xffffffffu) { simt::sync_warp(mask); }
inline void __threadfence() { simt::fence(); }

namespace dskernels::simt {

template <class T>
T shuffle_from(unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = shuffle(mask, bits, source);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

// The first lane of the part of `width` lanes that the lane belongs to.
inline int first_lane(int width) { return lane() / width * width; }

}  // namespace dskernels::simt

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return simt::shuffle_from(mask, value, simt::first_lane(width) + (source & (width - 1)));
}

// From the parts before, too, but from none after.
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  const int source = simt::lane() ^ (lanes & 31);
  return simt::shuffle_from(mask, value, source < simt::first_lane(width) + width ? source : simt::lane());
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
  const int source = simt::lane() + static_cast<int>(lanes & 31);
  return simt::shuffle_from(mask, value, source < simt::first_lane(width) + width ? source : simt::lane());
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
  const int source = simt::lane() - static_cast<int>(lanes & 31);
  return simt::shuffle_from(mask, value, source >= simt::first_lane(width) ? source : simt::lane());
}

inline unsigned __ballot_sync(unsigned mask, int predicate) { return simt::ballot(mask, predicate != 0); }
inline int __any_sync(unsigned mask, int predicate) { return simt::ballot(mask, predicate != 0) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return simt::ballot(mask, predicate == 0) == 0; }
