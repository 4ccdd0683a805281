// How a task divides its scratch memory.
#pragma once

#include "common/vec.h"

namespace dskernels {
namespace {

// Hands out 64-byte aligned parts of a task's scratch; with base null it only counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}

  float* floats(int64_t count) { return part<float>(count); }

  template <class T>
  T* part(int64_t count) {
    T* part = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += round_up(count * int64_t{sizeof(T)}, 64);
    return part;
  }

  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace
}  // namespace dskernels
