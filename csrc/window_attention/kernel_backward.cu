// Backward of window attention on a GPU (FlashAttention-2, arXiv 2307.08691, section 2.3.2): scores are computed twice,
// once for the gradients of keys and values and once for that of queries, which needs no atomics: results are the same
// bits on every run.
#include <algorithm>

#include "window_attention/cuda_backward_keys.cuh"
#include "window_attention/cuda_backward_prepare.cuh"
#include "window_attention/cuda_backward_queries.cuh"

namespace dskernels {
namespace {

template <class T>
void turn(const WindowAttentionCuda& args, const View4& to, int width, void* stream) {
  const int64_t tiles = tile_count(args, false, group_of(args.call), kTurnedTile);
  launch(window_attention_turn_queries<T>, grid_of(tiles * args.call.batch * args.call.heads_kv), kPrepareThreads, 0,
         stream, args, to, width, static_cast<int>(tiles));
}

template <class Tile>
void run(const WindowAttentionCudaBackward& args, void* stream) {
  using T = typename Tile::Type;
  const WindowAttentionArgs& call = args.forward.call;
  const int64_t delta_tiles = ceil_div(call.len_q, kDeltaTile);
  launch(window_attention_delta<T>, grid_of(delta_tiles * call.batch * call.heads_q), kPrepareThreads, 0, stream, args,
         static_cast<int>(delta_tiles));
  const int64_t key_tiles = tile_count(args.forward, true, 1, Tile::kRows);
  launch(window_attention_grad_keys<Tile>, grid_of(key_tiles * call.batch * call.heads_kv), Tile::kThreads,
         Tile::kSharedBytes, stream, args, static_cast<int>(key_tiles));
  const int64_t query_tiles = tile_count(args.forward, false, group_of(call), Tile::kRows);
  launch(window_attention_grad_queries<Tile>, grid_of(query_tiles * call.batch * call.heads_kv), Tile::kThreads,
         Tile::kSharedBytes, stream, args, static_cast<int>(query_tiles));
}

template <class T>
void run_for(const WindowAttentionCudaBackward& args, void* stream) {
  const int64_t dim = std::max(args.forward.call.dim_qk, args.forward.call.dim_v);
  if (dim <= 64) return run<typename BackwardTileFor<T, 64>::Type>(args, stream);
  if (dim <= 128) return run<typename BackwardTileFor<T, 128>::Type>(args, stream);
  run<typename BackwardTileFor<T, 256>::Type>(args, stream);
}

}  // namespace

void window_attention_turn_queries_cuda(const WindowAttentionCuda& args, const View4& to, int width, void* stream) {
  switch (args.call.q.element) {
    case Element::kFloat16: return turn<__half>(args, to, width, stream);
    case Element::kBFloat16: return turn<__nv_bfloat16>(args, to, width, stream);
    case Element::kFloat32: return turn<float>(args, to, width, stream);
  }
}

void window_attention_backward_cuda(const WindowAttentionCudaBackward& args, void* stream) {
  switch (args.forward.call.q.element) {
    case Element::kFloat16: return run_for<__half>(args, stream);
    case Element::kBFloat16: return run_for<__nv_bfloat16>(args, stream);
    case Element::kFloat32: return run_for<float>(args, stream);
  }
}

}  // namespace dskernels
