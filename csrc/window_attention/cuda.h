// What the CUDA kernels of window attention take, and their launches, on a cudaStream_t: plain data, no torch.
#pragma once

#include "window_attention/args.h"

namespace dskernels {

// What a call may have of len_q * heads_q / heads_kv and of len_k: kernels count both in int32, with room for sums of
// two. Offsets into tensors are int64 throughout.
constexpr int64_t kMaxCudaRows = (int64_t{1} << 30) - 1;

struct WindowAttentionCuda {
  // Packed sequences are a batch of 1, whose len_q and len_k are the tokens of all of them, and whose query_offset is
  // not used: the last query of a sequence stands at its last key. `bias` is float32.
  WindowAttentionArgs call;
  // Of cos and sin. Nobody has looked at positions: one outside the table gives NaN.
  int64_t table_rows;
  // [sequences + 1], where sequences begin among the queries and among the keys, int64 or, where not wide, int32; null
  // unless packed. Nobody has looked at them: wrong ones read and write nothing outside the tensors.
  const void *offsets_q, *offsets_k;
  bool wide_offsets_q, wide_offsets_k;
  int sequences;
  // Whether call.k holds keys that window_attention_turn_cuda has turned already.
  bool keys_turned;
};

// All keys that somebody sees, and how many elements their rows take, in whole 16 bytes.
struct WindowAttentionKeys {
  int64_t first, count, width;
};
WindowAttentionKeys window_attention_keys_cuda(const WindowAttentionCuda& args);

// Whether the forward wants keys turned beforehand: where many tiles of queries would each turn them anew.
bool window_attention_turns_keys_cuda(const WindowAttentionCuda& args);

// Writes these keys, turned to their positions, into `to`: [batch, heads_kv, len_k, width], of which only they need to
// be there; rows are dense and 16-byte aligned, with zeros behind dim_qk.
void window_attention_turn_cuda(const WindowAttentionCuda& args, const View4& to, void* stream);

// Writes all of out and lse.
void window_attention_forward_cuda(const WindowAttentionCuda& args, void* stream);

}  // namespace dskernels
