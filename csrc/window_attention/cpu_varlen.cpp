// Window attention over packed sequences: the kernels see each sequence as a call of batch 1 whose views begin at its
// rows, and the tasks of all sequences run as one list, so that short sequences do not wait for long ones.
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "window_attention/cpu_binding.h"

namespace dskernels {
namespace {

std::vector<int64_t> offsets_of(const Tensor& t, int64_t tokens, const char* name) {
  check_offsets(t, name);
  std::vector<int64_t> offsets(t.size(0));
  for (size_t i = 0; i < offsets.size(); ++i) {
    offsets[i] = integer_at(t, static_cast<int64_t>(i));
    const int64_t least = i == 0 ? 0 : offsets[i - 1], most = i == 0 ? 0 : tokens;
    STD_TORCH_CHECK(offsets[i] >= least && offsets[i] <= most, "window_attention_varlen: ", name, "[", i,
                    "]: expected ", least, " to ", most, ", got ", offsets[i]);
  }
  return offsets;
}

struct Packed {
  std::vector<int64_t> queries, keys;  // where each sequence begins, and where the last ends
  std::vector<WindowAttentionArgs> sequences;
};

Packed describe(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, const std::optional<Tensor>& cos,
                const std::optional<Tensor>& sin, const std::optional<Tensor>& sink, std::optional<int64_t> left,
                std::optional<int64_t> right, double scale, double softcap, bool interleaved) {
  WindowAttentionArgs args{};
  set_packed_operands(args, q, k, v);
  check_operands(args);
  STD_TORCH_CHECK(
      lse.is_contiguous() && lse.numel() == args.heads_q * q.size(0) && lse.scalar_type() == ScalarType::Float,
      "window_attention_varlen: lse: expected contiguous float32 [Hq, T]");
  args.lse_stride_head = q.size(0);
  set_scores(args, left, right, scale, softcap);
  set_sink(args, sink);
  set_rope(args, cos, sin, interleaved);

  Packed packed{
      offsets_of(cu_seqlens_q, q.size(0), "cu_seqlens_q"), offsets_of(cu_seqlens_k, k.size(0), "cu_seqlens_k"), {}};
  check_as_many(cu_seqlens_q, cu_seqlens_k);
  for (size_t i = 0; i + 1 < packed.queries.size(); ++i) {
    const int64_t query = packed.queries[i], key = packed.keys[i];
    args.len_q = packed.queries[i + 1] - query;
    args.len_k = packed.keys[i + 1] - key;
    args.query_offset = args.len_k - args.len_q;
    if (cos.has_value()) check_table_rows(args, cos->size(0));
    args.q = packed_view(q, "q", query);
    args.k = packed_view(k, "k", key);
    args.v = packed_view(v, "v", key);
    args.out = packed_view(out, "out", query);
    args.lse = static_cast<float*>(lse.data_ptr()) + query;
    packed.sequences.push_back(args);
  }
  return packed;
}

// Runs f(sequence, task, scratch) for `counts[i]` tasks of every sequence i.
template <class F>
void run_all(const std::vector<int64_t>& counts, int64_t scratch_bytes, const F& f) {
  std::vector<int64_t> ends;
  int64_t tasks = 0;
  for (const int64_t count : counts) ends.push_back(tasks += count);
  run_tasks(tasks, scratch_bytes, [&](int64_t task, void* scratch) {
    const size_t i = std::upper_bound(ends.begin(), ends.end(), task) - ends.begin();
    f(i, task - (ends[i] - counts[i]), scratch);
  });
}

// Zeros in the tokens from `token` on of a fresh [tokens, heads, columns] tensor, which no sequence writes.
void clear_from(const Tensor& t, int64_t token) {
  const int64_t row_bytes = t.size(1) * t.size(2) * static_cast<int64_t>(t.element_size());
  if (row_bytes == 0 || token == t.size(0)) return;
  std::memset(static_cast<char*>(t.data_ptr()) + token * row_bytes, 0, (t.size(0) - token) * row_bytes);
}

Tensor empty_packed(const Tensor& like, int64_t tokens, int64_t heads, int64_t columns) {
  const Tensor result = torch::stable::new_empty(like, {tokens, heads, columns});
  advise_huge_pages(result);
  return result;
}

std::tuple<Tensor, Tensor> window_attention_varlen_cpu(const Tensor& q, const Tensor& k, const Tensor& v,
                                                       const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                                       std::optional<Tensor> cos, std::optional<Tensor> sin,
                                                       std::optional<Tensor> sink, std::optional<int64_t> left,
                                                       std::optional<int64_t> right, double scale, double softcap,
                                                       bool interleaved) {
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3,
                  "window_attention_varlen: q, k, v: expected 3 dimensions");
  const int64_t tokens = q.size(0), heads = q.size(1);
  Tensor out = empty_packed(q, tokens, heads, v.size(2));
  Tensor lse = torch::stable::new_empty(q, {heads, tokens}, ScalarType::Float);
  const Packed packed =
      describe(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, cos, sin, sink, left, right, scale, softcap, interleaved);
  const int64_t end = packed.queries.back();
  clear_from(out, end);
  for (int64_t h = 0; h < heads; ++h) {
    float* row = static_cast<float*>(lse.data_ptr()) + h * tokens;
    std::fill(row + end, row + tokens, -std::numeric_limits<float>::infinity());
  }
  if (heads == 0) return {out, lse};

  const WindowAttentionKernels& kernels = DSKERNELS_SELECT_TIER(window_attention_kernels);
  std::vector<int64_t> tasks;
  int64_t scratch_bytes = 0;
  for (const WindowAttentionArgs& sequence : packed.sequences) {
    const WindowAttentionPlan plan = kernels.plan(sequence);
    tasks.push_back(plan.tasks);
    scratch_bytes = std::max(scratch_bytes, plan.scratch_bytes);
  }
  run_all(tasks, scratch_bytes,
          [&](size_t i, int64_t task, void* scratch) { kernels.run(packed.sequences[i], task, scratch); });
  return {out, lse};
}

// Plans and runs the backward of all sequences; `sequences` lacks its part of the shared buffer still.
void run_backward(std::vector<WindowAttentionBackwardArgs>& sequences, const Tensor& lse) {
  const WindowAttentionKernels& kernels = DSKERNELS_SELECT_TIER(window_attention_kernels);
  std::vector<int64_t> tasks, merge_tasks, shared_begin;
  int64_t scratch_bytes = 0, shared_floats = 0;
  for (const WindowAttentionBackwardArgs& sequence : sequences) {
    const WindowAttentionPlan plan = kernels.plan_backward(sequence.forward);
    tasks.push_back(plan.tasks);
    merge_tasks.push_back(plan.merge_tasks);
    shared_begin.push_back(shared_floats);
    shared_floats += plan.shared_bytes / int64_t{sizeof(float)};
    scratch_bytes = std::max(scratch_bytes, plan.scratch_bytes);
  }
  const Tensor shared = torch::stable::new_empty(lse, {shared_floats}, ScalarType::Float);
  advise_huge_pages(shared);
  for (size_t i = 0; i < sequences.size(); ++i) {
    sequences[i].shared = static_cast<float*>(shared.data_ptr()) + shared_begin[i];
  }
  run_all(tasks, scratch_bytes,
          [&](size_t i, int64_t task, void* scratch) { kernels.run_backward(sequences[i], task, scratch); });
  run_all(merge_tasks, 0,
          [&](size_t i, int64_t task, void* scratch) { kernels.merge_backward(sequences[i], task, scratch); });
}

std::tuple<Tensor, Tensor, Tensor> window_attention_varlen_backward_cpu(
    const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& lse, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
    std::optional<Tensor> cos, std::optional<Tensor> sin, std::optional<Tensor> sink, std::optional<int64_t> left,
    std::optional<int64_t> right, double scale, double softcap, bool interleaved) {
  const Packed packed =
      describe(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, cos, sin, sink, left, right, scale, softcap, interleaved);
  for (const Tensor* t : {&grad_out, &out}) {
    STD_TORCH_CHECK(t->dim() == 3 && t->size(0) == q.size(0) && t->size(1) == q.size(1) && t->size(2) == v.size(2),
                    "window_attention_varlen_backward: grad_out, out: expected [T, Hq, Dv]");
  }
  Tensor grad_lse_rows;
  if (grad_lse.has_value()) {
    STD_TORCH_CHECK(grad_lse->numel() == lse.numel() && grad_lse->scalar_type() == ScalarType::Float,
                    "window_attention_varlen_backward: grad_lse: expected float32 [Hq, T]");
    grad_lse_rows = torch::stable::contiguous(*grad_lse);
  }
  Tensor grad_q = empty_packed(q, q.size(0), q.size(1), q.size(2));
  Tensor grad_k = empty_packed(k, k.size(0), k.size(1), k.size(2));
  Tensor grad_v = empty_packed(v, v.size(0), v.size(1), v.size(2));
  clear_from(grad_q, packed.queries.back());
  clear_from(grad_k, packed.keys.back());
  clear_from(grad_v, packed.keys.back());
  if (q.size(1) == 0) return {grad_q, grad_k, grad_v};

  std::vector<WindowAttentionBackwardArgs> sequences;
  for (size_t i = 0; i < packed.sequences.size(); ++i) {
    WindowAttentionBackwardArgs args{};
    args.forward = packed.sequences[i];
    args.grad_out = packed_view(grad_out, "grad_out", packed.queries[i]);
    args.grad_q = packed_view(grad_q, "grad_q", packed.queries[i]);
    args.grad_k = packed_view(grad_k, "grad_k", packed.keys[i]);
    args.grad_v = packed_view(grad_v, "grad_v", packed.keys[i]);
    if (grad_lse.has_value()) {
      args.grad_lse = static_cast<const float*>(grad_lse_rows.data_ptr()) + packed.queries[i];
    }
    sequences.push_back(args);
  }
  run_backward(sequences, lse);
  return {grad_q, grad_k, grad_v};
}

}  // namespace
}  // namespace dskernels

STABLE_TORCH_LIBRARY_IMPL(dskernels, CPU, m) {
  m.impl("window_attention_varlen", TORCH_BOX(&dskernels::window_attention_varlen_cpu));
  m.impl("window_attention_varlen_backward", TORCH_BOX(&dskernels::window_attention_varlen_backward_cpu));
}
