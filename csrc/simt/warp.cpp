// The warp-wide operations: what the last lane computes for all of them.
#include "simt/simt.h"

namespace dskernels::simt {
namespace {

struct Shuffle {
  uint64_t value, result;
  int source;
};

struct Ballot {
  bool vote;
  unsigned result;
};

struct Ldmatrix {
  uint32_t row[4];
  uint32_t* r;
  bool transposed;
};

// Operands of a lane; c is read and written in place.
template <class Accumulator>
struct Multiply {
  Accumulator* c;
  const uint32_t* a;
  const uint32_t* b;
};

// Not CUDA's function, which the compiler does not turn into vectors.
float half_at(uint32_t pair, int i) {
  const uint32_t bits = pair >> 16 * i & 0xffff, magnitude = bits & 0x7fff;
  // The exponent's bias is 112 less than float's; the product gives subnormal numbers their value, too.
  const uint32_t scaled = bits_as<uint32_t>(bits_as<float>(magnitude << 13) * 0x1p112f);
  const uint32_t special = magnitude >= 0x7c00 ? 0x7f800000 : 0;
  return bits_as<float>(scaled | special | (bits & 0x8000) << 16);
}

float bfloat16_at(uint32_t pair, int i) { return bits_as<float>((pair >> 16 * i & 0xffff) << 16); }

// The hardware looks at the upper 19 bits alone.
float tf32_at(uint32_t bits, int) { return bits_as<float>(bits & ~0x1fffu); }

int32_t int8_at(uint32_t four, int i) { return static_cast<int8_t>(four >> 8 * i); }

// kElements of a register, each of type Value; the depth is that of 8 registers of a row of A.
template <class Value, int kElements, Value (*element)(uint32_t, int), class Accumulator>
void multiply(void* const* lanes, unsigned) {
  constexpr int kHalf = 4 * kElements, kDepth = 2 * kHalf;
  Value a[16][kDepth], b[kDepth][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& own = *static_cast<const Multiply<Accumulator>*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; ++r) {
      for (int i = 0; i < kElements; ++i) {
        const int depth = kElements * t + i;
        a[g + 8 * (r % 2)][depth + kHalf * (r / 2)] = element(own.a[r], i);
        if (r < 2) b[depth + kHalf * r][g] = element(own.b[r], i);
      }
    }
  }
  Accumulator c[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& own = *static_cast<const Multiply<Accumulator>*>(lanes[lane]);
    for (int i = 0; i < 4; ++i) c[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2] = own.c[i];
  }
  for (int m = 0; m < 16; ++m) {
    for (int k = 0; k < kDepth; ++k) {
      for (int n = 0; n < 8; ++n) c[m][n] += a[m][k] * b[k][n];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& own = *static_cast<const Multiply<Accumulator>*>(lanes[lane]);
    for (int i = 0; i < 4; ++i) own.c[i] = c[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
  }
}

void load_matrices(void* const* lanes, unsigned) {
  for (int lane = 0; lane < 32; ++lane) {
    const auto& own = *static_cast<const Ldmatrix*>(lanes[lane]);
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint32_t pair = 0;
      for (int i = 0; i < 2; ++i) {
        const int row = own.transposed ? 2 * (lane % 4) + i : lane / 4;
        const int column = own.transposed ? lane / 4 : 2 * (lane % 4) + i;
        const uint32_t word = static_cast<const Ldmatrix*>(lanes[8 * matrix + row])->row[column / 2];
        pair |= (word >> 16 * (column % 2) & 0xffff) << 16 * i;
      }
      own.r[matrix] = pair;
    }
  }
}

}  // namespace

uint64_t shuffle(unsigned mask, uint64_t value, int source) {
  Shuffle own{value, 0, source};
  meet(
      mask, &own,
      [](void* const* lanes, unsigned here) {
        for (int i = 0; i < 32; ++i) {
          if ((here >> i & 1) == 0) continue;
          auto& lane = *static_cast<Shuffle*>(lanes[i]);
          // What a lane outside gives is undefined; ones show where it is used.
          const bool is_here = (here >> lane.source & 1) != 0;
          lane.result = is_here ? static_cast<const Shuffle*>(lanes[lane.source])->value : ~uint64_t{0};
        }
      },
      "__shfl_sync");
  return own.result;
}

unsigned ballot(unsigned mask, bool vote) {
  Ballot own{vote, 0};
  meet(
      mask, &own,
      [](void* const* lanes, unsigned here) {
        unsigned votes = 0;
        for (int i = 0; i < 32; ++i) {
          if ((here >> i & 1) != 0 && static_cast<const Ballot*>(lanes[i])->vote) votes |= 1u << i;
        }
        for (int i = 0; i < 32; ++i) {
          if ((here >> i & 1) != 0) static_cast<Ballot*>(lanes[i])->result = votes;
        }
      },
      "__ballot_sync");
  return own.result;
}

void ldmatrix_rows_x4(uint32_t (&r)[4], const uint32_t (&row)[4], bool transposed) {
  Ldmatrix own{{row[0], row[1], row[2], row[3]}, r, transposed};
  meet_all(&own, load_matrices, transposed ? "ldmatrix.trans" : "ldmatrix");
}

void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool half) {
  Multiply<float> own{c, a, b};
  meet_all(&own, half ? multiply<float, 2, half_at, float> : multiply<float, 2, bfloat16_at, float>, "mma.m16n8k16");
}

void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Multiply<float> own{c, a, b};
  meet_all(&own, multiply<float, 1, tf32_at, float>, "mma.m16n8k8.tf32");
}

void mma_m16n8k32_s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Multiply<int32_t> own{c, a, b};
  meet_all(&own, multiply<int32_t, 4, int8_at, int32_t>, "mma.m16n8k32.s8");
}

}  // namespace dskernels::simt
