// Where the windows lie, as the CUDA kernels see it: a regular grid that begins at or before the image's first token
// and reaches beyond its last. A kernel knows a token by its place in the window, so that a bias stays where it is from
// cell to cell; a place beyond the border of the image is not there to be seen.
#pragma once

#include "common/cuda.cuh"
#include "swin_attention/args.h"

namespace dskernels {
namespace {

constexpr int kMostTokens = 256;  // of a window
constexpr int kThreads = 128;     // of a block of every kernel here
constexpr int kWarps = kThreads / kWarp;

// A place: a row of a window in the upper half, a column in the lower. Differences of both at once are negative, each
// in its half, where one of them is; what a column borrows from a row is of no matter then.
constexpr int kPlaceColumn = 0xffff, kNowhere = 0x7fff0000;
constexpr unsigned kSigns = 0x80008000u;

struct CellGrid {
  int64_t rows, columns, cells;  // of all images
  int64_t top, left;             // how far the first cell begins above and left of the image

  explicit CellGrid(const SwinAttentionArgs& args)
      : top((args.window_height - args.shift_height) % args.window_height),
        left((args.window_width - args.shift_width) % args.window_width) {
    const bool is_empty = args.height == 0 || args.width == 0;
    rows = is_empty ? 0 : ceil_div(args.height + top, args.window_height);
    columns = is_empty ? 0 : ceil_div(args.width + left, args.window_width);
    cells = args.batch * rows * columns;
  }
};

// A cell, by its window: the places from `low` to `high` are there, in rows and in columns.
struct Cell {
  int image, row, column;  // in the grid
  int low, high;

  __device__ Cell(const SwinAttentionArgs& args, const CellGrid& grid, int64_t index)
      : image(static_cast<int>(index / (grid.rows * grid.columns))),
        row(static_cast<int>(index / grid.columns % grid.rows)),
        column(static_cast<int>(index % grid.columns)) {
    find_bounds(args, grid);
  }

  // To the next one, without a division.
  __device__ void advance(const SwinAttentionArgs& args, const CellGrid& grid) {
    if (++column == grid.columns) {
      column = 0;
      if (++row == grid.rows) {
        row = 0;
        ++image;
      }
    }
    find_bounds(args, grid);
  }

  __device__ bool has(int place) const {
    return ((static_cast<unsigned>(place - low) | static_cast<unsigned>(high - place)) & kSigns) == 0;
  }

 private:
  __device__ void find_bounds(const SwinAttentionArgs& args, const CellGrid& grid) {
    const int64_t y = row * args.window_height - grid.top, x = column * args.window_width - grid.left;
    low = static_cast<int>(max(-y, int64_t{0}) << 16 | max(-x, int64_t{0}));
    high = static_cast<int>((min(args.height - y, args.window_height) - 1) << 16 |
                            (min(args.width - x, args.window_width) - 1));
  }
};

// One head of one part (queries, keys, values) of an image [batch, height, width, channels].
template <class T>
struct Image {
  T* data;
  int64_t stride[4];

  __device__ Image(const View4& view, int64_t channel)
      : data(static_cast<T*>(view.data) + channel * view.stride[3]),
        stride{view.stride[0], view.stride[1], view.stride[2], view.stride[3]} {}

  // Of the window's first token, which may lie outside.
  __device__ int64_t origin(const SwinAttentionArgs& args, const CellGrid& grid, const Cell& cell) const {
    return cell.image * stride[0] + (cell.row * args.window_height - grid.top) * stride[1] +
           (cell.column * args.window_width - grid.left) * stride[2];
  }

  __device__ int64_t offset(int place) const { return (place >> 16) * stride[1] + (place & kPlaceColumn) * stride[2]; }
};

// Writes the places of `count` tokens, of those beyond the window kNowhere. All threads of the block call it.
__device__ inline void list_places(const SwinAttentionArgs& args, int count, int* places) {
  const int width = static_cast<int>(args.window_width), tokens = static_cast<int>(args.window_height) * width;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    places[i] = i < tokens ? (i / width) << 16 | i % width : kNowhere;
  }
}

// Which work a block has: a tile of a window's tokens, a head, and a run of cells.
struct Work {
  int tile, head;
  int64_t first_cell;
  int cells;

  __device__ Work(const CellGrid& grid, int tiles, int heads, int run) {
    const int64_t block = blockIdx.x;
    tile = static_cast<int>(block % tiles);
    head = static_cast<int>(block / tiles % heads);
    first_cell = block / tiles / heads * run;
    cells = static_cast<int>(grid.cells - first_cell < run ? grid.cells - first_cell : run);
  }
};

// How many cells a block walks over, so that some blocks are left for each multiprocessor.
inline int cells_of_run(int64_t cells, int64_t others, int blocks, int most) {
  const int64_t run = cells * others / (int64_t{blocks} * multiprocessors());
  return static_cast<int>(run < 1 ? 1 : run < most ? run : most);
}

inline int tokens_of(const SwinAttentionArgs& args) { return static_cast<int>(args.window_height * args.window_width); }

// Whether whole rows of each head can be moved 16 bytes at a time.
template <class T>
bool moves_by_16(const View4& view, int64_t dim) {
  constexpr int64_t kVector = 16 / sizeof(T);
  return view.stride[3] == 1 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && dim % kVector == 0 &&
         view.stride[0] % kVector == 0 && view.stride[1] % kVector == 0 && view.stride[2] % kVector == 0;
}

}  // namespace
}  // namespace dskernels
