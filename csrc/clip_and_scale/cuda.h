// What launches the CUDA kernels of clip_and_scale. All pointers but `stream`, a cudaStream_t, are to memory of the
// device, and none is followed on the host; nothing waits for the device.
#pragma once

#include "clip_and_scale/args.h"

namespace dskernels {

// Writes rows[i] = {sum of |x|^power over the elements x of chunk i, 1 if one of these is not finite and else 0}, with
// the largest |x| that is no NaN instead of the sum for kMaximum. Chunks have at most 2^30 elements.
void power_sums_cuda(const Run* chunks, int64_t count, NormKind kind, double power, double (*rows)[2], void* stream);

// What follows from the rows of all chunks.
struct FactorArgs {
  const double (*rows)[2];
  int64_t count;
  NormKind kind;
  double power;
  // One number of type `loss_scale_type`, or null: then `loss_scale` is it.
  const void* loss_scale_data;
  RunType loss_scale_type;
  double loss_scale;
  // Infinity for no clipping.
  double max_norm;
  // Results of one element: (sum of sums)^(1/power) / loss scale; 1 if a row is not finite, else 0; and what to
  // multiply all elements by, which is 1 where a row is not finite.
  float *norm, *found_inf;
  double* factor;
};

void clip_factor_cuda(const FactorArgs& args, void* stream);

// x *= *factor for all elements of the chunks, rounded once. Neither reads nor writes them where the factor is 1.
void scale_cuda(const Run* chunks, int64_t count, const double* factor, void* stream);

}  // namespace dskernels
