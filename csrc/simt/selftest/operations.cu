// One warp, one operation: what tests/test_emulator_operations.py compares with computations of its own. Arrays hold
// one word a lane, matrices are row-major.
#include "common/mma.cuh"

#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))

namespace dskernels {
namespace {

enum Operation : int {
  kShuffle,
  kShuffleXor,
  kShuffleUp,
  kShuffleDown,
  kBallot,
  kAny,
  kAll,
  kCount,
  kOr,
  kBytePerm,
  kDp4a,
  kLop3And,
  kLop3Or,
  kLop3Majority,
  kLop3Select,
  kToTf32,
  kHfma2,
  kExp2,
  kPopc,
  kClz,
};

__device__ __half2 pair_of(uint32_t bits) {
  __half2 pair;
  memcpy(&pair, &bits, sizeof(bits));
  return pair;
}

__global__ void apply(int operation, const uint32_t* x, const uint32_t* y, const uint32_t* z, uint32_t* out, int lanes,
                      int width) {
  const int i = threadIdx.x;
  const uint32_t a = x[i], b = y[i], c = z[i];
  const unsigned mask = kAllLanes;
  uint32_t result = 0;
  switch (operation) {
    case kShuffle: result = __shfl_sync(mask, a, static_cast<int>(b), width); break;
    case kShuffleXor: result = __shfl_xor_sync(mask, a, lanes, width); break;
    case kShuffleUp: result = __shfl_up_sync(mask, a, lanes, width); break;
    case kShuffleDown: result = __shfl_down_sync(mask, a, lanes, width); break;
    case kBallot: result = __ballot_sync(mask, static_cast<int>(a)); break;
    case kAny: result = __any_sync(mask, static_cast<int>(a)); break;
    case kAll: result = __all_sync(mask, static_cast<int>(a)); break;
    case kCount: result = __syncthreads_count(static_cast<int>(a)); break;
    case kOr: result = __syncthreads_or(static_cast<int>(a)); break;
    case kBytePerm: result = __byte_perm(a, b, c); break;
    case kDp4a: result = __dp4a(static_cast<int>(a), static_cast<int>(b), static_cast<int>(c)); break;
    case kLop3And: result = ptx::lop3<0xf0 & 0xcc & 0xaa>(a, b, c); break;
    case kLop3Or: result = ptx::lop3<0xf0 | 0xcc | 0xaa>(a, b, c); break;
    case kLop3Majority: result = ptx::lop3<0xe8>(a, b, c); break;
    case kLop3Select: result = ptx::lop3<(0xf0 & 0xcc) | (~0xf0 & 0xaa)>(a, b, c); break;
    case kToTf32: result = ptx::to_tf32(__uint_as_float(a)); break;
    case kHfma2: {
      const __half2 sum = __hfma2(pair_of(a), pair_of(b), pair_of(c));
      memcpy(&result, &sum, sizeof(result));
      break;
    }
    case kExp2: result = __float_as_uint(ptx::exp2_approximate(__uint_as_float(a))); break;
    case kPopc: result = __popc(a); break;
    case kClz: result = __clz(static_cast<int>(a)); break;
  }
  out[i] = result;
}

// Two floats a lane, as one value of 64 bits.
__global__ void shuffle_wide(const double* x, double* out, int lanes) {
  out[threadIdx.x] = __shfl_xor_sync(kAllLanes, x[threadIdx.x], lanes);
}

// c[16][8] += a[16][K] * bt[8][K]^T, with eight words of elements in a row of a and bt. Of the four shapes alike, a
// lane holds words t and t + 4 of rows g and g + 8 of a, and of row g of bt.
__global__ void product_of_fragments(int kind, const uint32_t (*a)[8], const uint32_t (*bt)[8], uint32_t (*c)[8]) {
  const int g = lane_index() / 4, t = lane_index() % 4;
  const uint32_t of_a[4] = {a[g][t], a[g + 8][t], a[g][t + 4], a[g + 8][t + 4]};
  const uint32_t of_b[2] = {bt[g][t], bt[g][t + 4]};
  uint32_t* const places[4] = {&c[g][2 * t], &c[g][2 * t + 1], &c[g + 8][2 * t], &c[g + 8][2 * t + 1]};
  float sums[4];
  int32_t integers[4];
  for (int i = 0; i < 4; ++i) {
    sums[i] = __uint_as_float(*places[i]);
    integers[i] = static_cast<int32_t>(*places[i]);
  }
  switch (kind) {
    case 0: ptx::mma_m16n8k16<__half>(sums, of_a, of_b); break;
    case 1: ptx::mma_m16n8k16<__nv_bfloat16>(sums, of_a, of_b); break;
    case 2: ptx::mma_m16n8k8_tf32(sums, of_a, of_b); break;
    case 3: ptx::mma_m16n8k32_s8(integers, of_a, of_b); break;
  }
  for (int i = 0; i < 4; ++i) {
    *places[i] = kind == 3 ? static_cast<uint32_t>(integers[i]) : __float_as_uint(sums[i]);
  }
}

// r[lane] of four 8x8 matrices of 16 bits, the 32 rows of which follow each other.
__global__ void load_matrices(const uint32_t (*rows)[4], uint32_t (*r)[4], bool transposed) {
  SIMT_SHARED(shared, uint4[kWarp]);
  const int lane = lane_index();
  shared[lane] = uint4{rows[lane][0], rows[lane][1], rows[lane][2], rows[lane][3]};
  __syncwarp();
  uint32_t own[4];
  if (transposed) {
    ptx::ldmatrix_x4_trans(own, &shared[lane]);
  } else {
    ptx::ldmatrix_x4(own, &shared[lane]);
  }
  for (int i = 0; i < 4; ++i) r[lane][i] = own[i];
}

}  // namespace
}  // namespace dskernels

SIMT_EXPORT void simt_apply(int operation, const uint32_t* x, const uint32_t* y, const uint32_t* z, uint32_t* out,
                            int lanes, int width) {
  using namespace dskernels;
  launch(apply, dim3(1), kWarp, 0, nullptr, operation, x, y, z, out, lanes, width);
}

SIMT_EXPORT void simt_shuffle_wide(const double* x, double* out, int lanes) {
  using namespace dskernels;
  launch(shuffle_wide, dim3(1), kWarp, 0, nullptr, x, out, lanes);
}

SIMT_EXPORT void simt_mma(int kind, const uint32_t (*a)[8], const uint32_t (*bt)[8], uint32_t (*c)[8]) {
  using namespace dskernels;
  launch(product_of_fragments, dim3(1), kWarp, 0, nullptr, kind, a, bt, c);
}

SIMT_EXPORT void simt_ldmatrix(const uint32_t (*rows)[4], uint32_t (*r)[4], bool transposed) {
  using namespace dskernels;
  launch(load_matrices, dim3(1), kWarp, 0, nullptr, rows, r, transposed);
}
