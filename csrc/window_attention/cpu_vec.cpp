// The CPU kernels of window attention, compiled once per tier.
#include "window_attention/cpu_backward.h"

namespace dskernels::DSKERNELS_TIER {

extern const WindowAttentionKernels window_attention_kernels;
const WindowAttentionKernels window_attention_kernels = {plan_forward, run_forward, plan_backward, run_backward,
                                                         run_merge};

}  // namespace dskernels::DSKERNELS_TIER
