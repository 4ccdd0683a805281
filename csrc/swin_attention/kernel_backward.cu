// The CUDA kernels of Swin attention: backward.
#include "swin_attention/cuda.h"
#include "swin_attention/cuda_wide_backward.cuh"

namespace dskernels {
namespace {

bool is_wide(const SwinAttentionArgs& args) {
  return tokens_of(args) > kTileTokens || args.dim > (args.qkv.element == Element::kFloat32 ? 32 : 64);
}

// How the work divides, and the parts of `shared`.
struct Plan {
  int64_t tiles, runs;
  int run;
  int64_t bias_floats, logit_scale_floats, stats_floats;

  Plan(const SwinAttentionBackwardArgs& args, const CellGrid& grid) {
    const SwinAttentionArgs& forward = args.forward;
    const int64_t tokens = tokens_of(forward), heads = forward.heads;
    tiles = is_wide(forward) ? ceil_div(tokens, kWideRows) : 1;
    run = cells_of_run(grid.cells, heads * tiles, kBackwardBlocks, kBackwardRun);
    runs = ceil_div(grid.cells, run);
    bias_floats = args.grad_bias == nullptr ? 0 : runs * heads * tokens * tokens;
    logit_scale_floats = args.grad_logit_scale == nullptr ? 0 : runs * tiles * heads;
    stats_floats = is_wide(forward) ? 3 * grid.cells * heads * tokens : 0;
  }
};

template <class T>
void run_backward(const SwinAttentionBackwardArgs& args, const CellGrid& grid, const Plan& plan, void* stream) {
  const SwinAttentionArgs& forward = args.forward;
  float* logit_scale_parts = args.shared + plan.bias_floats;
  const Backward call{args,
                      grid,
                      plan.run,
                      moves_by_16<T>(forward.qkv, forward.dim),
                      moves_by_16<T>(args.grad_out, forward.dim),
                      moves_by_16<T>(args.grad_qkv, forward.dim),
                      args.grad_bias == nullptr ? nullptr : args.shared,
                      args.grad_logit_scale == nullptr ? nullptr : logit_scale_parts,
                      logit_scale_parts + plan.logit_scale_floats};
  if (is_wide(forward)) return launch_wide_backward<T>(call, stream);
  if (forward.dim <= 32) return launch_backward<T, 32>(call, stream);
  if constexpr (sizeof(T) == 2) launch_backward<T, 64>(call, stream);
}

}  // namespace

int64_t swin_attention_backward_floats(const SwinAttentionBackwardArgs& args) {
  const Plan plan(args, CellGrid(args.forward));
  return plan.bias_floats + plan.logit_scale_floats + plan.stats_floats;
}

void run_swin_attention_backward(const SwinAttentionBackwardArgs& args, void* stream) {
  const SwinAttentionArgs& forward = args.forward;
  const CellGrid grid(forward);
  const Plan plan(args, grid);
  switch (forward.qkv.element) {
    case Element::kFloat32: run_backward<float>(args, grid, plan, stream); break;
    case Element::kBFloat16: run_backward<__nv_bfloat16>(args, grid, plan, stream); break;
    case Element::kFloat16: run_backward<__half>(args, grid, plan, stream); break;
  }
  // Without a cell the sums are zeros.
  const int64_t heads = forward.heads, tokens = tokens_of(forward);
  if (args.grad_bias != nullptr) {
    launch_sum_parts(args.shared, plan.runs, heads * tokens * tokens, args.grad_bias, stream);
  }
  if (args.grad_logit_scale != nullptr) {
    launch_sum_parts(args.shared + plan.bias_floats, plan.runs * plan.tiles, heads, args.grad_logit_scale, stream);
  }
}

}  // namespace dskernels
