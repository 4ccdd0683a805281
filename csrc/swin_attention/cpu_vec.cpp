// The CPU kernels of Swin attention, compiled once per tier.
#include "swin_attention/cpu_backward.h"

namespace dskernels::DSKERNELS_TIER {

extern const SwinAttentionKernels swin_attention_kernels;
const SwinAttentionKernels swin_attention_kernels = {plan_forward, run_forward, plan_backward, run_backward,
                                                     merge_backward};

}  // namespace dskernels::DSKERNELS_TIER
