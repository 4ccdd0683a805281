// quantized_matmul where activations are rounded to int8: int8_dynamic, int8_static and int4_dynamic.
//
// One kernel rounds the rows of x, a second one multiplies. Few rows make few tiles, so a tile's columns are divided
// into segments, with a block for each; the block that comes last adds them up, in their order, whatever its own.
#include "quantized_matmul/cuda.h"
#include "quantized_matmul/cuda_groups.cuh"
#include "quantized_matmul/cuda_plan.h"
#include "quantized_matmul/cuda_quantize.cuh"
#include "quantized_matmul/cuda_result.cuh"

namespace dskernels {
namespace {

// Whether the block is the last of the `segments` blocks of a tile that come here. What they wrote before is then
// there to read.
__device__ inline bool is_last_of_tile(int* ticket, int64_t segments) {
  SIMT_SHARED(is_last, int[1]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last[0] = atomicAdd(ticket, 1) == segments - 1;
  __syncthreads();
  __threadfence();
  return is_last[0] != 0;
}

// What of the product is a block's, and of that a warp's: columns begin to end of x, rows and columns of `out`.
struct Place {
  int64_t row_tile, column_tile, segment;
  int64_t row, column, begin, end;
  int warp_row, warp_column;
  bool is_busy;  // whether the warp has any
};

template <class Tile>
__device__ inline Place place_of_block(const ProductArgs& args) {
  Place place;
  place.row_tile = blockIdx.x % args.row_tiles;
  const int64_t rest = blockIdx.x / args.row_tiles;
  place.segment = args.is_split ? rest % args.segments : 0;
  place.column_tile = args.is_split ? rest / args.segments : rest;
  place.row = place.row_tile * Tile::kRows;
  place.column = place.column_tile * Tile::kColumns;
  place.begin = place.segment * args.segment_columns;
  place.end = args.is_split ? min(place.begin + args.segment_columns, args.depth) : args.depth;
  place.warp_row = warp_index() / Tile::kWarpsN * 16 * Tile::kMTiles;
  place.warp_column = warp_index() % Tile::kWarpsN * 8 * Tile::kNTiles;
  place.is_busy = place.row + place.warp_row < args.rows && place.column + place.warp_column < args.columns;
  return place;
}

// Adds the products of the block's columns to `sums`; of int4, where it takes several segments, to `totals` those of
// all but the last. Copies of the next kStages - 1 steps are under way while one is multiplied.
template <class Tile, class Sums, class Sum>
__device__ inline void sum_products(const ProductArgs& args, const Place& place, uint8_t* stages, Sums& sums,
                                    Sum* totals) {
  constexpr int kStages = Tile::kStages, kDepth = Tile::kDepth;
  const auto copy = [&](int64_t k, int stage) {
    if (k < place.end) copy_step<Tile>(args, place.row, place.column, k, stages + stage * Tile::kStageBytes);
    // A group in every round, empty or not, so that the count of those under way is the same in all.
    ptx::cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) copy(place.begin + stage * kDepth, stage);
  sums.begin(args, place.column + place.warp_column, place.begin);
  int stage = 0;
  [[maybe_unused]] int64_t segment_end = place.begin + args.segment_columns;
  for (int64_t k = place.begin; k < place.end; k += kDepth) {
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();
    copy(k + (kStages - 1) * kDepth, stage == 0 ? kStages - 1 : stage - 1);
    if (place.is_busy) {
      sums.add_step(args, stages + stage * Tile::kStageBytes, place.warp_row, place.warp_column, k, place.end);
      if constexpr (Tile::kInt4) {
        if (k + kDepth == segment_end && segment_end < place.end) {
          put_sums<Tile>(sums.sums, totals, Tile::kSumStride, place.warp_row, place.warp_column, args.rows - place.row,
                         segment_end > args.segment_columns);
          sums.clear();
          segment_end += args.segment_columns;
        }
      }
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  sums.finish(args);
  ptx::cp_async_wait<0>();
  __syncthreads();
}

// Writes a tile of `out`; split, one segment of its sums to `parts`, and the tile where it is the last to. A block a
// tile, or a segment of one: those of the same columns of the weight follow each other. With few rows the weight's way
// from memory is what bounds it, with many the tensor cores are.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) integer_product_kernel(ProductArgs args) {
  using Sum = std::conditional_t<Tile::kInt4, float, int32_t>;
  SharedCarver carver;
  uint8_t* stages = carver.take<uint8_t>(Tile::kPipelineBytes);
  Sum* totals = reinterpret_cast<Sum*>(stages);
  if constexpr (Tile::kInt4) totals = carver.take<Sum>(Tile::kSumBytes / 4);
  const Place place = place_of_block<Tile>(args);
  std::conditional_t<Tile::kInt4, Int4Sums<Tile>, Int8Sums<Tile>> sums;
  sum_products<Tile>(args, place, stages, sums, totals);

  const int64_t rows = args.rows - place.row;
  if (!args.is_split) {
    if (place.is_busy) {
      const bool adds = Tile::kInt4 && place.end > args.segment_columns;
      put_sums<Tile>(sums.sums, totals, Tile::kSumStride, place.warp_row, place.warp_column, rows, adds);
    }
    __syncthreads();
    write_tile<Tile>(args, totals, Tile::kSumStride, 0, 1, place.row, place.column);
    return;
  }
  constexpr int64_t kPart = Tile::kRows * Tile::kColumns;
  const int64_t tile = place.column_tile * args.row_tiles + place.row_tile, tiles = gridDim.x / args.segments;
  Sum* parts = static_cast<Sum*>(args.parts) + tile * kPart;
  if (place.is_busy) {
    put_sums<Tile>(sums.sums, parts + place.segment * tiles * kPart, Tile::kColumns, place.warp_row, place.warp_column,
                   rows, false);
  }
  if (!is_last_of_tile(args.tickets + tile, args.segments)) return;
  write_tile<Tile>(args, parts, Tile::kColumns, tiles * kPart, args.segments, place.row, place.column);
}

// Sixteen rows: 30 KB and more of weights under way in each block. More rows: warps of 32 x 32, or 64 x 32.
using Int8Narrow = IntegerTile<false, 1, 2, 1, 4, 128, 4, 4>;
using Int8Middle = IntegerTile<false, 2, 4, 2, 4, 64, 4, 2>;
using Int8Wide = IntegerTile<false, 4, 4, 2, 4, 64, 4, 2>;
using Int4Narrow = IntegerTile<true, 1, 2, 1, 4, 128, 4, 4>;
using Int4Wide = IntegerTile<true, 2, 4, 2, 4, 64, 4, 1>;

template <class Tile>
void launch_product(const ProductArgs& args, const IntegerPlan& plan, void* stream) {
  const int64_t blocks = plan.tiles() * (plan.is_split ? plan.segments : 1);
  launch(integer_product_kernel<Tile>, dim3(static_cast<unsigned>(blocks)), Tile::kThreads,
         shared_bytes<uint8_t>(Tile::kPipelineBytes) + (Tile::kInt4 ? shared_bytes<uint8_t>(Tile::kSumBytes) : 0),
         stream, args);
}

QuantizeArgs quantize_args(const QuantizedMatmulArgs& args, const IntegerPlan& plan) {
  const int64_t bytes = size_of(args.element);
  const bool by_16 = args.x_stride_column == 1 && args.input_order == nullptr &&
                     reinterpret_cast<uintptr_t>(args.x) % 16 == 0 && args.x_stride_row * bytes % 16 == 0;
  QuantizeArgs result{};
  result.x = args.x;
  result.stride_row = args.x_stride_row;
  result.stride_column = args.x_stride_column;
  result.element = args.element;
  result.by_16 = by_16;
  result.input_order = args.input_order;
  result.input_scale = args.scheme == Scheme::kInt8Static ? args.input_scale : nullptr;
  result.columns = args.in_features;
  result.padded = plan.padded;
  result.is_int4 = args.scheme == Scheme::kInt4Dynamic;
  result.codes = reinterpret_cast<int8_t*>(args.prepared + plan.codes);
  result.row_scale = reinterpret_cast<float*>(args.prepared + plan.row_scale);
  result.unlift = reinterpret_cast<float*>(args.prepared + plan.unlift);
  result.tickets = reinterpret_cast<int*>(args.prepared + plan.tickets);
  result.ticket_count = plan.is_split ? plan.tiles() : 0;
  return result;
}

ProductArgs product_args(const QuantizedMatmulArgs& args, const IntegerPlan& plan, const QuantizeArgs& x) {
  ProductArgs result{};
  result.codes = x.codes;
  result.qweight = args.qweight;
  result.scale = args.scale;
  result.zero_point = args.zero_point;
  result.rows = args.rows;
  result.columns = args.out_features;
  result.depth = args.in_features;
  result.padded = plan.padded;
  result.row_bytes = args.row_bytes;
  // Without columns there are no groups to divide by.
  result.group_size = args.group_size > 0 ? args.group_size : 1;
  result.groups = args.groups;
  result.row_tiles = plan.row_tiles;
  result.segments = plan.segments;
  result.segment_columns = plan.segment_columns;
  result.by_16 = reinterpret_cast<uintptr_t>(args.qweight) % 16 == 0 && args.row_bytes % 16 == 0;
  result.is_split = plan.is_split;
  result.parts = args.prepared + plan.parts;
  result.tickets = x.tickets;
  result.row_scale = x.row_scale;
  result.unlift = x.unlift;
  result.bias = args.bias;
  result.bias_element = args.bias_element;
  result.element = args.element;
  result.bias_stride = args.bias_stride;
  result.out = args.out;
  return result;
}

}  // namespace

int64_t quantized_matmul_integer_scratch_bytes(const QuantizedMatmulArgs& args) { return integer_plan(args).bytes; }

void quantized_matmul_integer_cuda(const QuantizedMatmulArgs& args, void* stream) {
  const IntegerPlan plan = integer_plan(args);
  const QuantizeArgs quantize = quantize_args(args, plan);
  launch(quantize_rows_kernel, dim3(static_cast<unsigned>(args.rows)), kQuantizeThreads, 0, stream, quantize);
  const ProductArgs product = product_args(args, plan, quantize);
  if (args.scheme == Scheme::kInt4Dynamic) {
    return plan.tile_rows == 16 ? launch_product<Int4Narrow>(product, plan, stream)
                                : launch_product<Int4Wide>(product, plan, stream);
  }
  switch (plan.tile_rows) {
    case 16: return launch_product<Int8Narrow>(product, plan, stream);
    case 64: return launch_product<Int8Middle>(product, plan, stream);
    default: return launch_product<Int8Wide>(product, plan, stream);
  }
}

}  // namespace dskernels
