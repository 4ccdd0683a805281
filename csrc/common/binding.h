// What every CPU binding needs of torch's stable ABI: views, allocation and the running of tasks.
#pragma once

#include <sys/mman.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "common/elements.h"

namespace dskernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Element element_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return Element::kFloat32;
    case ScalarType::BFloat16: return Element::kBFloat16;
    case ScalarType::Half: return Element::kFloat16;
    default: STD_TORCH_CHECK(false, name, ": expected float32, bfloat16 or float16, got another dtype");
  }
}

inline View4 view4(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 4, name, ": expected 4 dimensions, got ", t.dim());
  return {t.data_ptr(), element_of(t, name), {t.stride(0), t.stride(1), t.stride(2), t.stride(3)}};
}

// Asks for huge pages under a large fresh result. Its memory has often never been touched, and a fault for every 4 KiB
// costs as much as the kernel that writes there.
inline void advise_huge_pages(const Tensor& t) {
#ifdef MADV_HUGEPAGE
  if (!t.is_cpu()) return;
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(t.data_ptr());
  const uintptr_t end = begin + static_cast<uintptr_t>(t.numel()) * t.element_size();
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage, last = end / kHugePage * kHugePage;
  // Only advice: where the system has none to give, nothing changes.
  if (first < last) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// A fresh [batch, heads, rows, columns] tensor in the memory order of `like`: heads innermost but one where `like` has
// them so, as a projection leaves them. The fake kernels follow the same rule (`empty_in_layout_of` in
// dskernels/_library.py).
inline Tensor empty_in_order_of(const Tensor& like, int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
  const bool token_major = like.stride(1) < like.stride(2);
  const Tensor result = token_major ? torch::stable::new_empty(like, {batch, rows, heads, columns})
                                    : torch::stable::new_empty(like, {batch, heads, rows, columns});
  advise_huge_pages(result);
  return token_major ? torch::stable::transpose(result, 1, 2) : result;
}

// Runs f(task, scratch) for every task on torch's threads, each thread with scratch of its own. Threads take the next
// task when they are done with one, so uneven tasks and busy cores even out; tasks must not depend on each other.
template <class F>
void run_tasks(int64_t tasks, int64_t scratch_bytes, const F& f) {
  if (tasks == 0) return;
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), tasks);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      // aligned_alloc wants a whole multiple of the alignment.
      const std::unique_ptr<void, Free> scratch(
          std::aligned_alloc(64, static_cast<size_t>(scratch_bytes + 63) / 64 * 64 + 64));
      if (scratch == nullptr) throw std::bad_alloc();
      for (int64_t task = next++; task < tasks; task = next++) f(task, scratch.get());
    }
  });
}

}  // namespace dskernels
