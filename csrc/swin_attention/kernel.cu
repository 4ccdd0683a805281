// The CUDA kernels of Swin attention: forward.
#include "swin_attention/cuda.h"
#include "swin_attention/cuda_wide_forward.cuh"

namespace dskernels {
namespace {

template <class T>
void run_forward(const SwinAttentionArgs& args, void* stream) {
  if (args.dim <= 32) return launch_forward<T, 32>(args, stream);
  if constexpr (sizeof(T) == 2) {
    if (args.dim <= 64) return launch_forward<T, 64>(args, stream);
  }
  launch_wide_forward<T>(args, stream);
}

}  // namespace

void run_swin_attention(const SwinAttentionArgs& args, void* stream) {
  switch (args.qkv.element) {
    case Element::kFloat32: return run_forward<float>(args, stream);
    case Element::kBFloat16: return run_forward<__nv_bfloat16>(args, stream);
    case Element::kFloat16: return run_forward<__half>(args, stream);
  }
}

}  // namespace dskernels
