// Where the windows lie: cells of a grid over the image, cut off at its borders.
//
// A shifted window that wraps around the image falls apart into regions that do not see each other (Swin, arXiv
// 2103.14030, section 3.2), so each region is a cell of its own here. There is nothing to roll and nothing to mask.
#pragma once

#include "common/vec.h"
#include "swin_attention/args.h"

namespace dskernels {
namespace {

constexpr int kMostTokens = 256;  // of a window
constexpr int kMostDim = 256;     // of a head

// Cells of one axis, [begin, end), all of one length.
struct Segment {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

// One axis of the grid. Its cells are, in order: one that the shift cuts off, whole ones, one that the border cuts off.
struct Axis {
  int64_t length, window, shift;

  // Tokens before the first whole window.
  int64_t head() const { return min_of(shift, length); }
  int64_t cut() const { return head() > 0 ? 1 : 0; }
  int64_t whole() const { return (length - head()) / window; }
  int64_t rest() const { return (length - head()) % window; }

  // The three runs of cells that are alike; any may be empty.
  Segment segment(int i) const {
    const int64_t bounds[] = {0, cut(), cut() + whole(), cut() + whole() + (rest() > 0 ? 1 : 0)};
    return {bounds[i], bounds[i + 1]};
  }

  int64_t first_token(int64_t cell) const { return cell < cut() ? 0 : head() + (cell - cut()) * window; }
  int64_t tokens(int64_t cell) const { return cell < cut() ? head() : min_of(window, length - first_token(cell)); }
  // The place in its window of the cell's first token.
  int64_t first_place(int64_t cell) const { return cell < cut() ? window - shift : 0; }
};

// One cell in one image.
struct Cell {
  int64_t batch, y, x;       // of its first token
  int64_t height, width;     // tokens
  int64_t place_y, place_x;  // of its first token in the window
  int kind;                  // cells of one kind have all but batch, y and x in common

  int64_t tokens() const { return height * width; }
};

// The cells of all images, ordered by kind, so that what depends on the kind alone is made once for many cells.
class Grid {
 public:
  static constexpr int kKinds = 9;

  explicit Grid(const SwinAttentionArgs& args)
      : rows_{args.height, args.window_height, args.shift_height},
        columns_{args.width, args.window_width, args.shift_width},
        batch_(args.batch),
        first_{} {
    for (int kind = 0; kind < kKinds; ++kind) {
      const int64_t cells = rows_.segment(kind / 3).count() * columns_.segment(kind % 3).count();
      first_[kind + 1] = first_[kind] + batch_ * cells;
    }
  }

  int64_t cells() const { return first_[kKinds]; }

  Cell cell(int64_t index) const {
    int kind = 0;
    while (index >= first_[kind + 1]) ++kind;
    const Segment rows = rows_.segment(kind / 3), columns = columns_.segment(kind % 3);
    const int64_t i = index - first_[kind];
    const int64_t row = rows.begin + i / columns.count() % rows.count();
    const int64_t column = columns.begin + i % columns.count();
    return {i / columns.count() / rows.count(),
            rows_.first_token(row),
            columns_.first_token(column),
            rows_.tokens(row),
            columns_.tokens(column),
            rows_.first_place(row),
            columns_.first_place(column),
            kind};
  }

 private:
  Axis rows_, columns_;
  int64_t batch_;
  int64_t first_[kKinds + 1];
};

// How the work divides: a task takes some heads and a run of cells.
struct Division {
  int64_t groups, chunks;

  // `table_floats` are kept for each head of a task, and should stay in the cache. They are made once a task, which
  // costs little beside `cells` cells.
  Division(const SwinAttentionArgs& args, const Grid& grid, int64_t table_floats, int64_t cells, int64_t most_tasks) {
    constexpr int64_t kTables = 32 << 10, kFewestTasks = 16;
    const int64_t together = clamp_to(kTables / max_of(table_floats, int64_t{1}), int64_t{1}, args.heads);
    groups = (args.heads + together - 1) / together;
    chunks = clamp_to(grid.cells() / cells, int64_t{1}, max_of(most_tasks / groups, int64_t{1}));
    groups = max_of(groups, min_of(args.heads, kFewestTasks / chunks));
  }

  int64_t tasks() const { return groups * chunks; }
  int64_t most_heads(const SwinAttentionArgs& args) const { return (args.heads + groups - 1) / groups; }
};

// The part of one task: heads [head_begin, head_end) of cells [cell_begin, cell_end).
struct Share {
  int64_t head_begin, head_end, cell_begin, cell_end;

  Share(const SwinAttentionArgs& args, const Grid& grid, const Division& division, int64_t task) {
    const int64_t group = task / division.chunks, chunk = task % division.chunks;
    head_begin = args.heads * group / division.groups;
    head_end = args.heads * (group + 1) / division.groups;
    cell_begin = grid.cells() * chunk / division.chunks;
    cell_end = grid.cells() * (chunk + 1) / division.chunks;
  }

  int64_t heads() const { return head_end - head_begin; }
};

}  // namespace
}  // namespace dskernels
