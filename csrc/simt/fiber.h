// A fiber of the emulator, and the words in which sanitizers are told of it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "simt/simt.h"

#if defined(SIMT_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(SIMT_THREAD_SANITIZER)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace dskernels::simt {

// An order that ThreadSanitizer is told of: what came before a release comes before what follows an acquire.
inline void release([[maybe_unused]] void* order) {
#ifdef SIMT_THREAD_SANITIZER
  __tsan_release(order);
#endif
}

inline void acquire([[maybe_unused]] void* order) {
#ifdef SIMT_THREAD_SANITIZER
  __tsan_acquire(order);
#endif
}

// While it lives, ThreadSanitizer does not take for accesses of the kernel what the emulator allocates, fills and
// frees.
class Unseen {
 public:
  Unseen() {
#ifdef SIMT_THREAD_SANITIZER
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
  }
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;
  ~Unseen() {
#ifdef SIMT_THREAD_SANITIZER
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
#endif
  }
};

// A stack with a thread of the kernel on it, or, without a stack of its own, whoever launches.
class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  // Gives it a stack, on which `entry` is called at the first switch; it never returns.
  void begin(void (*entry)());
  // Takes the place of the system's thread that calls.
  void adopt();
  // Leaves this fiber for `other`, and returns when somebody switches back.
  void switch_to(Fiber& other);
  // The first thing to do on a new stack, having come from `launcher`.
  static void arrived(Fiber& launcher);

 private:
  void* saved_ = nullptr;  // stack pointer
  void* stack_ = nullptr;
  const void* bottom_ = nullptr;
  size_t size_ = 0;
  [[maybe_unused]] void* fake_stack_ = nullptr;
  [[maybe_unused]] void* thread_ = nullptr;
};

}  // namespace dskernels::simt
