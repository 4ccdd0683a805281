// The CPU kernels of quantized_matmul, compiled once per tier: how a call divides, and what becomes of its sums.
#include "quantized_matmul/cpu_dot.h"
#include "quantized_matmul/cpu_nibble_rows.h"
#include "quantized_matmul/cpu_panels.h"

namespace dskernels {
namespace {

// Rows of the weight in a task that reads them as they lie: a multiple of every tier's tile, and few enough to keep all
// cores busy.
constexpr int64_t kDotTaskColumns = 48;
constexpr int64_t kMostTaskColumns =
    kMostPanels * kPanelColumns > kDotTaskColumns ? kMostPanels * kPanelColumns : kDotTaskColumns;
// Prepared rows of a task. They pass by once for each panel, in order, so the last cache serves; and a panel is
// unpacked once for all of them.
constexpr int64_t kTaskBytes = int64_t{5} << 20;
// Columns up to which an int32 holds any sum of products of codes: 131072 * 127 * 128 < 2^31.
constexpr int64_t kExactColumns = 131072;
static_assert(kExactColumns % kCodeBlock == 0);

// Picoseconds that a weight takes to be read and decoded, and a product of it and an activation, roughly, with AVX-512.
// It is enough to tell what is worth a second thread, whose waking up takes about kWakePicoseconds.
constexpr int64_t kWakePicoseconds = 6'000'000;

int64_t estimated_picoseconds(const QuantizedMatmulArgs& args) {
  const bool codes = has_codes(args.scheme);
  const int64_t weight = codes ? 30 : args.scheme == Scheme::kFp8Block ? 200 : 100, product = codes ? 6 : 20;
  return args.in_features * args.out_features * (weight + product * args.rows);
}

QuantizedMatmulPlan plan(const QuantizedMatmulArgs& args) {
  QuantizedMatmulPlan plan{};
  const bool single = has_single_rows(args);
  plan.tile_rows = single ? 1 : kTileRows;
  plan.tile_bytes = tile_bytes(args);
  plan.tiles = (args.rows + plan.tile_rows - 1) / plan.tile_rows;
  plan.prepare_scratch = prepare_scratch_bytes(args);
  plan.task_columns = single ? kDotTaskColumns : kPanelColumns * panels_of(args);
  plan.column_blocks = (args.out_features + plan.task_columns - 1) / plan.task_columns;
  // Blocks of about the same size.
  const int64_t most_tiles = max_of<int64_t>(kTaskBytes / plan.tile_bytes, 1);
  const int64_t blocks = (plan.tiles + most_tiles - 1) / most_tiles;
  const int64_t tiles = (plan.tiles + blocks - 1) / blocks;
  plan.task_rows = tiles * plan.tile_rows;
  plan.row_blocks = (plan.tiles + tiles - 1) / tiles;
  plan.serial = estimated_picoseconds(args) < 2 * kWakePicoseconds;
  // Sums in 32 bits, and in 64 for int8; a panel.
  plan.scratch_bytes = plan.task_rows * plan.task_columns * (is_int8_by_int8(args.scheme) ? 12 : 4);
  if (!single) plan.scratch_bytes += PanelScratch(args).bytes(panels_of(args));
  return plan;
}

// The part of a call that a task computes, and its sums, [rows][task_columns].
struct Task {
  int64_t first_row, rows, first_column, columns;
  const uint8_t* tiles;
  void* sums;
  void* scratch;
};

Task task_of(const QuantizedMatmulArgs& args, const QuantizedMatmulPlan& plan, int64_t number, void* scratch) {
  const int64_t row = number / plan.column_blocks * plan.task_rows;
  const int64_t column = number % plan.column_blocks * plan.task_columns;
  char* sums = static_cast<char*>(scratch) + (has_single_rows(args) ? 0 : PanelScratch(args).bytes(panels_of(args)));
  return {row,
          min_of(plan.task_rows, args.rows - row),
          column,
          min_of(plan.task_columns, args.out_features - column),
          args.prepared + row / plan.tile_rows * plan.tile_bytes,
          sums,
          scratch};
}

const uint8_t* tile_of(const QuantizedMatmulPlan& plan, const Task& task, int64_t row) {
  return task.tiles + row / plan.tile_rows * plan.tile_bytes;
}

const RowHead& head_of(const QuantizedMatmulPlan& plan, const Task& task, int64_t row) {
  return reinterpret_cast<const RowHead*>(tile_of(plan, task, row))[row % plan.tile_rows];
}

// out = values + bias, for one row; `values` is overwritten.
void finish_row(const QuantizedMatmulArgs& args, const Task& task, int64_t row, float* values) {
  if (args.bias != nullptr) {
    float bias[kMostTaskColumns];
    const char* from =
        static_cast<const char*>(args.bias) + task.first_column * args.bias_stride * size_of(args.bias_element);
    load_row(args.bias_element, from, args.bias_stride, task.columns, bias);
    for (int64_t j = 0; j < task.columns; ++j) values[j] += bias[j];
  }
  char* to = static_cast<char*>(args.out) +
             ((task.first_row + row) * args.out_features + task.first_column) * size_of(args.element);
  store_row(args.element, values, 1.0f, task.columns, to, 1);
}

PanelTask panel_task(const QuantizedMatmulPlan& plan, const Task& task) {
  return {task.tiles, plan.tile_bytes, task.rows, task.first_column, task.sums, static_cast<char*>(task.scratch)};
}

// The sum of the codes of columns [begin, end) of a row of a tile of `height` rows.
int32_t code_sum(const QuantizedMatmulArgs& args, const QuantizedMatmulPlan& plan, const Task& task, int64_t row,
                 int64_t begin, int64_t end) {
  if (end - begin == args.in_features) return head_of(plan, task, row).sum;
  const int64_t place = row % plan.tile_rows, first = row - place;
  const int64_t height = uses_dots(args) ? 1 : tile_height(min_of(plan.tile_rows, task.rows - first));
  const int8_t* codes = reinterpret_cast<const int8_t*>(tile_of(plan, task, row)) + kHeadBytes;
  int32_t sum = 0;
  for (int64_t k = begin; k < end; ++k) sum += codes[(k / 4 * height + place) * 4 + k % 4];
  return sum;
}

// out = ((sum * scale of x) * scale of w) * unlift + bias.
template <class Sum>
void finish_int8_row(const QuantizedMatmulArgs& args, const Task& task, int64_t row, const Sum* sums,
                     const RowHead& head) {
  float values[kMostTaskColumns];
  for (int64_t j = 0; j < task.columns; ++j) {
    values[j] = static_cast<float>(sums[j]) * head.scale * args.scale[task.first_column + j] * head.unlift;
  }
  finish_row(args, task, row, values);
}

void run_int8(const QuantizedMatmulArgs& args, const QuantizedMatmulPlan& plan, const Task& task) {
  const int64_t stride = plan.task_columns, columns = args.in_features, count = plan.task_rows * stride;
  int32_t* sums = static_cast<int32_t*>(task.sums);
  int64_t* wide = reinterpret_cast<int64_t*>(sums + count);
  const bool is_long = columns > kExactColumns;
  if (is_long) std::memset(wide, 0, static_cast<size_t>(count) * sizeof(int64_t));
  int64_t begin = 0;
  do {
    const int64_t end = min_of(begin + kExactColumns, columns);
    std::memset(sums, 0, static_cast<size_t>(count) * sizeof(int32_t));
    if (uses_dots(args)) {
      const int8_t* x = reinterpret_cast<const int8_t*>(task.tiles) + kHeadBytes;
      const uint8_t* w = args.qweight + task.first_column * args.row_bytes;
      add_dots({x, plan.tile_bytes, w, args.row_bytes, begin, end, sums, stride}, task.rows, task.columns);
    } else {
      if (end > begin) add_panels(args, panel_task(plan, task), begin, end);
    }
    for (int64_t i = 0; i < task.rows; ++i) {
      const uint32_t codes = static_cast<uint32_t>(code_sum(args, plan, task, i, begin, end));
      for (int64_t j = 0; j < task.columns; ++j) {
        int32_t* sum = sums + i * stride + j;
        *sum = static_cast<int32_t>(static_cast<uint32_t>(*sum) - uint32_t{kCodeOffset} * codes);
        if (is_long) wide[i * stride + j] += *sum;
      }
    }
    begin = end;
  } while (begin < columns);
  for (int64_t i = 0; i < task.rows; ++i) {
    const RowHead& head = head_of(plan, task, i);
    is_long ? finish_int8_row(args, task, i, wide + i * stride, head)
            : finish_int8_row(args, task, i, sums + i * stride, head);
  }
}

// Those whose scales change along a row: they are in the sums already.
void run_blocks(const QuantizedMatmulArgs& args, const QuantizedMatmulPlan& plan, const Task& task) {
  float* sums = static_cast<float*>(task.sums);
  std::memset(sums, 0, static_cast<size_t>(plan.task_rows * plan.task_columns) * sizeof(float));
  if (uses_nibble_rows(args)) {
    add_nibble_rows(args, task.tiles, plan.tile_bytes, task.rows, task.first_column, task.columns, sums,
                    plan.task_columns);
  } else if (args.in_features > 0) {
    add_panels(args, panel_task(plan, task), 0, args.in_features);
  }
  for (int64_t i = 0; i < task.rows; ++i) {
    float* values = sums + i * plan.task_columns;
    if (args.scheme == Scheme::kInt8WeightOnly) {
      for (int64_t j = 0; j < task.columns; ++j) values[j] *= args.scale[task.first_column + j];
    }
    const RowHead& head = head_of(plan, task, i);
    for (int64_t j = 0; j < task.columns; ++j) values[j] = values[j] * head.scale * head.unlift;
    finish_row(args, task, i, values);
  }
}

void run(const QuantizedMatmulArgs& args, const QuantizedMatmulPlan& plan, int64_t number, void* scratch) {
  const Task task = task_of(args, plan, number, scratch);
  is_int8_by_int8(args.scheme) ? run_int8(args, plan, task) : run_blocks(args, plan, task);
}

}  // namespace

namespace DSKERNELS_TIER {

extern const QuantizedMatmulKernels quantized_matmul_kernels;
const QuantizedMatmulKernels quantized_matmul_kernels = {plan, prepare_tile, run};

}  // namespace DSKERNELS_TIER
}  // namespace dskernels
