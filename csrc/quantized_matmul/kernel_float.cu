// The CUDA kernels of quantized_matmul where sums are of floats: int8_weight_only, int4_weight_only and fp8_block; and
// of weights in floats for all schemes.
//
// Up to kFewRows rows the sum of an element of out is taken in one order, whatever the rows: how columns are split
// depends on the shape of the weight, and tiles of more rows take each row's columns as those of few do. So a row has
// the same bits as alone.
//
// More rows of int8 and int4 go to torch's own product, with the weight in floats: codes would be unpacked again for
// every tile of rows, and such kernels fall behind cuBLAS from about a hundred rows on (vllm issue 2497). Not so fp8:
// its scales come in between, block by block in float32, and e4m3 times e4m3 is exact as float16. Rows beyond kFewRows
// are not split there, and have the same bits in every batch of so many. sm_80 has no products of fp8; those of later
// GPUs, with wgmma, are for when they can be run.
#include <stdexcept>

#include "quantized_matmul/cuda.h"
#include "quantized_matmul/cuda_float_dequantize.cuh"
#include "quantized_matmul/cuda_float_prepare.cuh"
#include "quantized_matmul/cuda_float_product.cuh"

namespace dskernels {
namespace {

// Two tiles of 64 rows. Beyond, reading the weight again and again costs more than to write it once as floats.
constexpr int64_t kFewRows = 128;
// Rows up to which a tile has 16 of them; else 64, or 32 where float sums in TF32 leave no registers for more.
constexpr int64_t kLeastRows = 16;
template <class T>
constexpr int kMostRowTiles = sizeof(T) == 4 ? 2 : 4;
// Stages below which a split of its own costs more than it saves.
constexpr int kLeastStages = 4;

int64_t aligned(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

bool is_fp8(const QuantizedMatmulArgs& args) { return args.scheme == Scheme::kFp8Block; }

// How a call goes, and where in the scratch memory its parts are.
struct Plan {
  bool copies;         // x, to have it aligned and in order
  int64_t row_stride;  // of the copy, or of what x is rounded to
  int stages, stages_of_split, splits;
  int64_t scales, parts, bytes;  // begin of the scales of blocks, of parts, and the end
};

Plan plan_of(const QuantizedMatmulArgs& args) {
  if (args.in_features > INT32_MAX) throw std::runtime_error("quantized_matmul: in_features: expected less than 2**31");
  Plan plan{};
  const int64_t size = is_fp8(args) ? 2 : size_of(args.element);
  plan.copies = args.input_order != nullptr || args.x_stride_column != 1 ||
                reinterpret_cast<uintptr_t>(args.x) % 16 != 0 || args.x_stride_row * size % 16 != 0;
  plan.row_stride = is_fp8(args)  ? args.groups * kScaleBlock
                    : plan.copies ? ceil_div(args.in_features, 16) * 16
                                  : args.x_stride_row;
  plan.stages = static_cast<int>(ceil_div(args.row_bytes, kStageBytes));
  const int64_t useful = args.rows <= kFewRows ? kEnoughBlocks / ceil_div(args.out_features, kTileColumns) : 1;
  plan.splits = static_cast<int>(max(min(useful, int64_t{plan.stages / kLeastStages}), int64_t{1}));
  plan.stages_of_split = static_cast<int>(ceil_div(plan.stages, plan.splits));
  // As many as have stages.
  plan.splits = plan.stages == 0 ? 1 : static_cast<int>(ceil_div(plan.stages, plan.stages_of_split));
  plan.scales = is_fp8(args) || plan.copies ? aligned(args.rows * plan.row_stride * size) : 0;
  plan.parts = plan.scales + (is_fp8(args) ? aligned(4 * args.rows * args.groups) : 0);
  plan.bytes = plan.parts + (plan.splits > 1 ? aligned(4 * plan.splits * args.rows * args.out_features) : 0);
  return plan;
}

void prepare(FloatProduct& p, const Plan& plan, void* stream) {
  QuantizedMatmulArgs& args = p.args;
  if (is_fp8(args)) {
    float* scales = reinterpret_cast<float*>(args.prepared + plan.scales);
    const int64_t blocks = ceil_div(args.rows * args.groups, kPrepareThreads / kWarp);
    launch(round_activations, dim3(static_cast<unsigned>(blocks)), kPrepareThreads, 0, stream, args,
           reinterpret_cast<__half*>(args.prepared), scales);
    p.x_scale = scales;
  } else if (plan.copies) {
    const dim3 grid(static_cast<unsigned>(ceil_div(args.rows * args.in_features, kPrepareThreads)));
    if (args.element == Element::kFloat32) {
      launch(copy_activations<uint32_t>, grid, kPrepareThreads, 0, stream, args,
             reinterpret_cast<uint32_t*>(args.prepared), plan.row_stride);
    } else {
      launch(copy_activations<uint16_t>, grid, kPrepareThreads, 0, stream, args,
             reinterpret_cast<uint16_t*>(args.prepared), plan.row_stride);
    }
  }
  if (is_fp8(args) || plan.copies) args.x = args.prepared;
  args.x_stride_row = plan.row_stride;
  args.x_stride_column = 1;
}

template <class T, Codes kCodes, int kRowTiles>
void multiply_tiles(FloatProduct& p, void* stream) {
  using Shape = Tile<T, kCodes, kRowTiles>;
  p.unit_value = Format<T, kCodes>::kUnitValue;
  p.row_tiles = ceil_div(p.args.rows, Shape::kRows);
  const int64_t tiles = p.row_tiles * ceil_div(p.args.out_features, kTileColumns);
  launch(float_product<T, kCodes, kRowTiles>, dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(p.splits)),
         kThreads, Shape::kStages * Shape::kSharedOfStage, stream, p);
}

template <class T, Codes kCodes>
void multiply_codes(FloatProduct& p, void* stream) {
  p.args.rows <= kLeastRows ? multiply_tiles<T, kCodes, 1>(p, stream)
                            : multiply_tiles<T, kCodes, kMostRowTiles<T>>(p, stream);
}

template <Codes kCodes>
void multiply_by(FloatProduct& p, void* stream) {
  switch (p.args.element) {
    case Element::kFloat16: return multiply_codes<__half, kCodes>(p, stream);
    case Element::kBFloat16: return multiply_codes<__nv_bfloat16, kCodes>(p, stream);
    case Element::kFloat32: return multiply_codes<float, kCodes>(p, stream);
  }
}

template <class T>
void dequantize(const Dequantize& d, void* stream) {
  const int64_t chunks = d.args.out_features * ceil_div(d.args.in_features, kOwnCodes);
  launch(dequantize_codes<T>, dim3(static_cast<unsigned>(ceil_div(chunks, kDequantizeThreads))), kDequantizeThreads, 0,
         stream, d);
}

}  // namespace

int64_t quantized_matmul_float_scratch_bytes(const QuantizedMatmulArgs& args) { return plan_of(args).bytes; }

void quantized_matmul_float_cuda(const QuantizedMatmulArgs& args, void* stream) {
  const Plan plan = plan_of(args);
  FloatProduct p{};
  p.args = args;
  p.parts = reinterpret_cast<float*>(args.prepared + plan.parts);
  p.stages = plan.stages;
  p.stages_of_split = plan.stages_of_split;
  p.splits = plan.splits;
  p.weight_by_16 = copies_by_16<uint8_t>(args.qweight, args.row_bytes, 1);
  prepare(p, plan, stream);
  switch (args.scheme) {
    case Scheme::kInt8WeightOnly: multiply_by<Codes::kInt8>(p, stream); break;
    case Scheme::kInt4WeightOnly: multiply_by<Codes::kInt4>(p, stream); break;
    default: multiply_codes<__half, Codes::kFp8>(p, stream);
  }
  if (p.splits > 1) {
    const int64_t blocks = ceil_div(args.rows * args.out_features, kJoinThreads);
    launch(join_parts, dim3(static_cast<unsigned>(blocks)), kJoinThreads, 0, stream, p);
  }
}

bool quantized_matmul_wants_dense_weight(const QuantizedMatmulArgs& args) {
  return args.rows > kFewRows && !is_fp8(args);
}

void dequantize_cuda(const QuantizedMatmulArgs& args, void* weight, void* stream) {
  const int64_t code_bytes = is_int4(args.scheme) ? kOwnCodes / 2 : kOwnCodes;
  const Dequantize d{args, weight,
                     reinterpret_cast<uintptr_t>(args.qweight) % code_bytes == 0 && args.row_bytes % code_bytes == 0,
                     args.input_order == nullptr && args.in_features % kOwnCodes == 0 &&
                         reinterpret_cast<uintptr_t>(weight) % 16 == 0};
  switch (args.element) {
    case Element::kFloat16: return dequantize<__half>(d, stream);
    case Element::kBFloat16: return dequantize<__nv_bfloat16>(d, stream);
    case Element::kFloat32: return dequantize<float>(d, stream);
  }
}

}  // namespace dskernels
