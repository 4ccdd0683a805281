// Binds the CPU kernel of window_attention_decode to torch. The public function has checked the arguments; what is
// checked again here is what memory safety needs when the op is called directly, and what no trace can check.
#include <tuple>
#include <vector>

#include "window_attention/cpu_binding.h"

namespace dskernels {
namespace {

std::vector<int64_t> lengths_of(const Tensor& t, const WindowAttentionArgs& args, int64_t rows) {
  check_lengths(t, args.batch);
  std::vector<int64_t> lengths(t.size(0));
  for (size_t b = 0; b < lengths.size(); ++b) {
    lengths[b] = integer_at(t, static_cast<int64_t>(b));
    STD_TORCH_CHECK(lengths[b] >= 0, "window_attention_decode: cache_lengths[", b,
                    "]: expected a number of tokens, got ", lengths[b]);
    STD_TORCH_CHECK(lengths[b] <= rows, "window_attention_decode: cache_lengths[", b, "]: expected up to ", rows,
                    " tokens, the rows of the table, got ", lengths[b]);
    // What a query still sees must not have been overwritten.
    STD_TORCH_CHECK(args.len_q == 0 || lengths[b] <= args.len_k || args.left + args.len_q <= args.len_k,
                    "window_attention_decode: cache_lengths[", b, "]: expected up to ", args.len_k,
                    " tokens, the slots of the cache, for ", args.len_q, " queries that look back ", args.left,
                    ", got ", lengths[b]);
  }
  return lengths;
}

std::tuple<Tensor, Tensor> window_attention_decode_cpu(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                                       const Tensor& cache_lengths, std::optional<Tensor> cos,
                                                       std::optional<Tensor> sin, std::optional<Tensor> sink,
                                                       std::optional<int64_t> left, std::optional<int64_t> right,
                                                       double scale, double softcap, bool interleaved,
                                                       bool keys_rotated) {
  STD_TORCH_CHECK(q.dim() == 4 && v_cache.dim() == 4, "window_attention_decode: q, v_cache: expected 4 dimensions");
  Tensor out = empty_in_order_of(q, q.size(0), q.size(1), q.size(2), v_cache.size(3));
  Tensor lse = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)}, ScalarType::Float);
  WindowAttentionDecodeArgs decode{};
  WindowAttentionArgs& args = decode.forward;
  set_operands(args, q, k_cache, v_cache, out, "k_cache", "v_cache");
  STD_TORCH_CHECK(sizes_agree(args, k_cache, v_cache),
                  "window_attention_decode: q, k_cache, v_cache: expected [B, Hq, Nq, D], [B, Hkv, S, D], "
                  "[B, Hkv, S, Dv]");
  check_heads(args);
  set_lse(args, lse);
  set_scores(args, left, right, scale, softcap);
  set_sink(args, sink);
  set_rope(args, cos, sin, interleaved);
  decode.keys_rotated = keys_rotated;
  const std::vector<int64_t> lengths = lengths_of(cache_lengths, args, cos.has_value() ? cos->size(0) : kUnbounded);
  decode.lengths = lengths.data();
  if (out.numel() == 0 && lse.numel() == 0) return {out, lse};

  const WindowAttentionKernels& kernels = DSKERNELS_SELECT_TIER(window_attention_kernels);
  const WindowAttentionPlan plan = kernels.plan_decode(args);
  const Tensor partial = torch::stable::new_empty(lse, {plan.shared_bytes / int64_t{sizeof(float)}}, ScalarType::Float);
  decode.partial = static_cast<float*>(partial.data_ptr());
  run_tasks(plan.tasks, plan.scratch_bytes,
            [&](int64_t task, void* scratch) { kernels.run_decode(decode, task, scratch); });
  run_tasks(plan.merge_tasks, 0, [&](int64_t task, void* scratch) { kernels.merge_decode(decode, task, scratch); });
  return {out, lse};
}

}  // namespace
}  // namespace dskernels

STABLE_TORCH_LIBRARY_IMPL(dskernels, CPU, m) {
  m.impl("window_attention_decode", TORCH_BOX(&dskernels::window_attention_decode_cpu));
}
