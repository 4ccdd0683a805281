// The CPU kernels of quantized_matmul, compiled once per tier: how a call divides, and what becomes of its sums.
#include "quantized_matmul/cpu_float.h"

namespace dskernels {
namespace {

// Rows of the weight in a task: a multiple of every tile's, and small enough to keep all cores busy to the end.
constexpr int64_t kTaskColumns = 48;
// Prepared rows of a task: they stay in the second cache while rows of the weight pass by.
constexpr int64_t kTaskBytes = int64_t{1} << 20;
// Columns up to which an int32 holds any sum of products of codes: 131072 * 127 * 128 < 2^31.
constexpr int64_t kExactColumns = 131072;

QuantizedMatmulPlan plan(const QuantizedMatmulArgs& args) {
  QuantizedMatmulPlan plan{};
  plan.prepared_stride = round_up(prepared_bytes(args), 64);
  plan.prepare_scratch = prepare_scratch_bytes(args);
  plan.rows_per_task = clamp_to<int64_t>(kTaskBytes / plan.prepared_stride / kFloatRows * kFloatRows, 16, 1024);
  plan.rows_per_task = min_of(plan.rows_per_task, round_up(max_of<int64_t>(args.rows, 1), kFloatRows));
  plan.columns_per_task = kTaskColumns;
  plan.row_blocks = (args.rows + plan.rows_per_task - 1) / plan.rows_per_task;
  plan.column_blocks = (args.out_features + kTaskColumns - 1) / kTaskColumns;
  // Sums of the block, in 32 bits and, for int8, in 64; a row of floats; for floats decoded weights and sums by lane.
  plan.scratch_bytes = plan.rows_per_task * kTaskColumns * 12 + kTaskColumns * int64_t{4};
  if (!has_codes(args.scheme)) {
    plan.scratch_bytes += kFloatColumns * (kFloatStretch * 4 + plan.rows_per_task * kVectorBytes) + 64;
  }
  return plan;
}

// The part of a call that a task computes.
struct Block {
  int64_t first_row, rows, first_column, columns;
};

Block block_of(const QuantizedMatmulArgs& args, const QuantizedMatmulPlan& plan, int64_t task) {
  const int64_t row = task / plan.column_blocks * plan.rows_per_task;
  const int64_t column = task % plan.column_blocks * plan.columns_per_task;
  return {row, min_of(plan.rows_per_task, args.rows - row), column,
          min_of(plan.columns_per_task, args.out_features - column)};
}

const RowHead& head_of(const QuantizedMatmulArgs& args, const QuantizedMatmulPlan& plan, int64_t row) {
  return *reinterpret_cast<const RowHead*>(args.prepared + row * plan.prepared_stride);
}

// out = values + bias, for one row of a block; `values` is overwritten.
void finish_row(const QuantizedMatmulArgs& args, const Block& block, int64_t row, float* values) {
  if (args.bias != nullptr) {
    float bias[kTaskColumns];
    const char* from =
        static_cast<const char*>(args.bias) + block.first_column * args.bias_stride * size_of(args.bias_element);
    load_row(args.bias_element, from, args.bias_stride, block.columns, bias);
    for (int64_t j = 0; j < block.columns; ++j) values[j] += bias[j];
  }
  char* to = static_cast<char*>(args.out) +
             ((block.first_row + row) * args.out_features + block.first_column) * size_of(args.element);
  store_row(args.element, values, 1.0f, block.columns, to, 1);
}

// out = ((sum * scale of x) * scale of w) * 2^n + bias.
template <class Sum>
void finish_int8_row(const QuantizedMatmulArgs& args, const Block& block, int64_t row, const Sum* sums,
                     const RowHead& head, float* values) {
  for (int64_t j = 0; j < block.columns; ++j) {
    values[j] = static_cast<float>(sums[j]) * head.scale * args.scale[block.first_column + j] * head.unlift;
  }
  finish_row(args, block, row, values);
}

// The sum of the codes of a prepared row, of columns [begin, end).
int32_t code_sum(const QuantizedMatmulArgs& args, const QuantizedMatmulPlan& plan, int64_t row, int64_t begin,
                 int64_t end) {
  const RowHead& head = head_of(args, plan, row);
  if (end - begin == args.in_features) return head.sum;
  const int8_t* codes = reinterpret_cast<const int8_t*>(&head) + kHeadBytes;
  int32_t sum = 0;
  for (int64_t k = begin; k < end; ++k) sum += codes[k];
  return sum;
}

IntegerTile operands(const QuantizedMatmulArgs& args, const QuantizedMatmulPlan& plan, const Block& block) {
  return {args.prepared + block.first_row * plan.prepared_stride, plan.prepared_stride,
          args.qweight + block.first_column * args.row_bytes, args.row_bytes};
}

void run_int8(const QuantizedMatmulArgs& args, const QuantizedMatmulPlan& plan, const Block& block, void* scratch) {
  int32_t* sums = static_cast<int32_t*>(scratch);
  int64_t* wide = reinterpret_cast<int64_t*>(sums + plan.rows_per_task * kTaskColumns);
  float* values = reinterpret_cast<float*>(wide + plan.rows_per_task * kTaskColumns);
  const int64_t columns = args.in_features, count = block.rows * kTaskColumns;
  const bool is_long = columns > kExactColumns;
  if (is_long) std::memset(wide, 0, static_cast<size_t>(count) * sizeof(int64_t));
  int64_t begin = 0;
  do {
    const int64_t end = min_of(begin + kExactColumns, columns);
    std::memset(sums, 0, static_cast<size_t>(count) * sizeof(int32_t));
    for (int64_t first = begin; first < end; first += kStretch) {
      const Int8Block tiles{operands(args, plan, block), first, min_of(first + kStretch, end), sums, kTaskColumns};
      for_each_tile<kIntegerRows, kIntegerColumns>(block.rows, block.columns, tiles);
    }
    for (int64_t i = 0; i < block.rows; ++i) {
      const uint32_t excess =
          uint32_t{kDotOffset} * static_cast<uint32_t>(code_sum(args, plan, block.first_row + i, begin, end));
      for (int64_t j = 0; j < block.columns; ++j) {
        int32_t* sum = sums + i * kTaskColumns + j;
        *sum = static_cast<int32_t>(static_cast<uint32_t>(*sum) - excess);
        if (is_long) wide[i * kTaskColumns + j] += *sum;
      }
    }
    begin = end;
  } while (begin < columns);
  for (int64_t i = 0; i < block.rows; ++i) {
    const RowHead& head = head_of(args, plan, block.first_row + i);
    if (is_long) {
      finish_int8_row(args, block, i, wide + i * kTaskColumns, head, values);
    } else {
      finish_int8_row(args, block, i, sums + i * kTaskColumns, head, values);
    }
  }
}

void run_int4(const QuantizedMatmulArgs& args, const QuantizedMatmulPlan& plan, const Block& block, void* scratch) {
  float* sums = static_cast<float*>(scratch);
  const Int4Block tiles{args, operands(args, plan, block), block.first_column, sums, kTaskColumns};
  for_each_tile<kIntegerRows, kIntegerColumns>(block.rows, block.columns, tiles);
  for (int64_t i = 0; i < block.rows; ++i) {
    const RowHead& head = head_of(args, plan, block.first_row + i);
    float* values = sums + i * kTaskColumns;
    for (int64_t j = 0; j < block.columns; ++j) values[j] = values[j] * head.scale * head.unlift;
    finish_row(args, block, i, values);
  }
}

template <class Weights>
void run_floats(const QuantizedMatmulArgs& args, const QuantizedMatmulPlan& plan, const Block& block, void* scratch) {
  VecF* lanes = static_cast<VecF*>(scratch);
  float* decoded = reinterpret_cast<float*>(lanes + plan.rows_per_task * kFloatColumns);
  float* sums = decoded + kFloatColumns * kFloatStretch;
  const uint8_t* x = args.prepared + block.first_row * plan.prepared_stride + kHeadBytes;
  const int64_t stride = plan.prepared_stride / int64_t{sizeof(float)};
  const FloatBlock<Weights> tiles{args,        reinterpret_cast<const float*>(x), stride, block.first_column, sums,
                                  kTaskColumns};
  multiply_floats(tiles, block.rows, block.columns, decoded, lanes);
  for (int64_t i = 0; i < block.rows; ++i) {
    float* values = sums + i * kTaskColumns;
    if constexpr (__is_same(Weights, Int8Weights)) {
      for (int64_t j = 0; j < block.columns; ++j) values[j] *= args.scale[block.first_column + j];
    }
    finish_row(args, block, i, values);
  }
}

void run(const QuantizedMatmulArgs& args, const QuantizedMatmulPlan& plan, int64_t task, void* scratch) {
  const Block block = block_of(args, plan, task);
  switch (args.scheme) {
    case Scheme::kInt8Dynamic:
    case Scheme::kInt8Static: return run_int8(args, plan, block, scratch);
    case Scheme::kInt4Dynamic: return run_int4(args, plan, block, scratch);
    case Scheme::kInt8WeightOnly: return run_floats<Int8Weights>(args, plan, block, scratch);
    case Scheme::kFp8Block: return run_floats<Fp8Weights>(args, plan, block, scratch);
    case Scheme::kInt4WeightOnly:
      return has_whole_groups(args) ? run_floats<Int4Weights<true>>(args, plan, block, scratch)
                                    : run_floats<Int4Weights<false>>(args, plan, block, scratch);
  }
}

}  // namespace

namespace DSKERNELS_TIER {

extern const QuantizedMatmulKernels quantized_matmul_kernels;
const QuantizedMatmulKernels quantized_matmul_kernels = {plan, prepare_row, run};

}  // namespace DSKERNELS_TIER
}  // namespace dskernels
