#include "simt/fiber.h"

#include <sys/mman.h>

#include <new>

#ifndef __x86_64__
#error "the emulator switches stacks in the assembly language of x86-64"
#endif

// Saves what a call must preserve, changes stacks, and returns where the other stack left off.
extern "C" void dskernels_simt_switch(void** saved, void* next);
asm(R"(
.text
.hidden dskernels_simt_switch
.globl dskernels_simt_switch
.type dskernels_simt_switch, @function
dskernels_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size dskernels_simt_switch, .-dskernels_simt_switch
)");

namespace dskernels::simt {
namespace {

// Sanitizers widen frames; what is not touched costs nothing.
constexpr size_t kStackBytes = size_t{1} << 19;
constexpr size_t kGuardBytes = 4096;
constexpr int kPreserved = 6;
#ifdef SIMT_THREAD_SANITIZER
constexpr unsigned kNoOrder = 1;
#endif

}  // namespace

Fiber::~Fiber() {
  if (stack_ == nullptr) return;
#ifdef SIMT_ADDRESS_SANITIZER
  __asan_unpoison_memory_region(bottom_, size_);
#elif defined(SIMT_THREAD_SANITIZER)
  __tsan_destroy_fiber(thread_);
#endif
  munmap(stack_, kStackBytes);
}

void Fiber::begin(void (*entry)()) {
  stack_ = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack_ == MAP_FAILED) throw std::bad_alloc();
  mprotect(stack_, kGuardBytes, PROT_NONE);
  bottom_ = static_cast<char*>(stack_) + kGuardBytes;
  size_ = kStackBytes - kGuardBytes;
  // At its entry a function expects a stack 8 bytes off a multiple of 16, as after a call.
  void** top = reinterpret_cast<void**>(static_cast<char*>(stack_) + kStackBytes) - 2;
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  top -= kPreserved;
  saved_ = top;
#ifdef SIMT_THREAD_SANITIZER
  thread_ = __tsan_create_fiber(0);
#endif
}

void Fiber::adopt() {
#ifdef SIMT_THREAD_SANITIZER
  thread_ = __tsan_get_current_fiber();
#endif
}

void Fiber::switch_to(Fiber& other) {
#ifdef SIMT_ADDRESS_SANITIZER
  __sanitizer_start_switch_fiber(&fake_stack_, other.bottom_, other.size_);
#elif defined(SIMT_THREAD_SANITIZER)
  __tsan_switch_to_fiber(other.thread_, kNoOrder);
#endif
  dskernels_simt_switch(&saved_, other.saved_);
#ifdef SIMT_ADDRESS_SANITIZER
  // Where the other's stack lies is known by now alone if it is another launcher's than the last time.
  __sanitizer_finish_switch_fiber(fake_stack_, &other.bottom_, &other.size_);
#endif
}

void Fiber::arrived([[maybe_unused]] Fiber& launcher) {
#ifdef SIMT_ADDRESS_SANITIZER
  // Only now is it known where the launcher's stack lies.
  __sanitizer_finish_switch_fiber(nullptr, &launcher.bottom_, &launcher.size_);
#endif
}

}  // namespace dskernels::simt
