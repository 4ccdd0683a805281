// The CPU kernels of window attention, compiled once per tier.
#include "window_attention/cpu_backward.h"
#include "window_attention/cpu_decode.h"

namespace dskernels::DSKERNELS_TIER {

extern const WindowAttentionKernels window_attention_kernels;
const WindowAttentionKernels window_attention_kernels = {plan_forward, run_forward, plan_backward, run_backward,
                                                         run_merge,    plan_decode, run_decode,    merge_decode};

}  // namespace dskernels::DSKERNELS_TIER
