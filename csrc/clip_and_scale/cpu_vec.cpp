// The CPU kernels of clip_and_scale, compiled once per tier.
//
// Sums are of doubles: they are exact enough for any list, hold 1e20 squared, and cost nothing where memory is what one
// waits for.
#include "clip_and_scale/args.h"
#include "common/rows.h"

namespace dskernels {
namespace {

// Half a vector of floats, in double.
constexpr int kDoubles = kLanes / 2;
typedef double VecD __attribute__((vector_size(kDoubles * 8)));
typedef float HalfVecF __attribute__((vector_size(kDoubles * 4)));

DSKERNELS_INLINE VecD load_doubles(const double* p) {
  typedef double Unaligned __attribute__((vector_size(kDoubles * 8), aligned(8), may_alias));
  return *reinterpret_cast<const Unaligned*>(p);
}

DSKERNELS_INLINE VecD load_doubles(const float* p) {
  typedef float Unaligned __attribute__((vector_size(kDoubles * 4), aligned(4), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const Unaligned*>(p), VecD);
}

DSKERNELS_INLINE VecD load_doubles(const BFloat16* p) {
  typedef uint16_t Halves __attribute__((vector_size(kDoubles * 2), aligned(2), may_alias));
  typedef uint32_t Words __attribute__((vector_size(kDoubles * 4)));
  const Words bits = __builtin_convertvector(*reinterpret_cast<const Halves*>(p), Words) << 16;
  return __builtin_convertvector(reinterpret_cast<HalfVecF>(bits), VecD);
}

DSKERNELS_INLINE VecD load_doubles(const Float16* p) {
#if defined(DSKERNELS_TIER_AVX512)
  return _mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__F16C__)
  return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return VecD{to_float(p[0]), to_float(p[1])};
#endif
}

DSKERNELS_INLINE double to_double(double x) { return x; }
template <class T>
DSKERNELS_INLINE double to_double(T x) {
  return to_float(x);
}

template <class X>
DSKERNELS_INLINE X magnitude(X x) {
  return x < X{} ? -x : x;
}

struct Sum {
  template <class X>
  static DSKERNELS_INLINE X add(X total, X x) {
    return total + magnitude(x);
  }
};
struct SumOfSquares {
  template <class X>
  static DSKERNELS_INLINE X add(X total, X x) {
    return total + x * x;
  }
};
struct SumOfCubes {
  template <class X>
  static DSKERNELS_INLINE X add(X total, X x) {
    return total + x * x * magnitude(x);
  }
};
// A NaN is lost here; the count of what is not finite brings it back.
struct Maximum {
  template <class X>
  static DSKERNELS_INLINE X add(X total, X x) {
    const X size = magnitude(x);
    return size > total ? size : total;
  }
};

// x - x is 0, and NaN where x is not finite, so their sum tells whether all are finite.
struct Totals {
  VecD value[4] = {}, finite[4] = {};
  double last_value = 0.0, last_finite = 0.0;
};

template <class Norm, class T>
DSKERNELS_NOINLINE void add_elements(const T* x, int64_t stride, int64_t count, Totals& totals) {
  int64_t i = 0;
  if (stride == 1) {
    for (; i + 4 * kDoubles <= count; i += 4 * kDoubles) {
      DSKERNELS_UNROLL
      for (int u = 0; u < 4; ++u) {
        const VecD values = load_doubles(x + i + u * kDoubles);
        totals.value[u] = Norm::add(totals.value[u], values);
        totals.finite[u] += values - values;
      }
    }
  }
  for (; i < count; ++i) {
    const double value = to_double(x[i * stride]);
    totals.last_value = Norm::add(totals.last_value, value);
    totals.last_finite += value - value;
  }
}

template <class T>
inline void add_powers(const T* x, int64_t stride, int64_t count, double power, Totals& totals) {
  for (int64_t i = 0; i < count; ++i) {
    const double value = to_double(x[i * stride]);
    totals.last_value += __builtin_pow(magnitude(value), power);
    totals.last_finite += value - value;
  }
}

// f(first element, stride, count) for each piece of a run that the span covers, typed.
template <class F>
inline void for_each_piece(const Run* runs, const RunSpan& span, const F& f) {
  int64_t left = span.count, offset = span.offset;
  for (const Run* run = runs + span.run; left > 0; ++run, offset = 0) {
    const int64_t count = min_of(run->count - offset, left), place = offset * run->stride;
    left -= count;
    switch (run->type) {
      case RunType::kFloat32: f(static_cast<float*>(run->data) + place, run->stride, count); break;
      case RunType::kBFloat16: f(static_cast<BFloat16*>(run->data) + place, run->stride, count); break;
      case RunType::kFloat16: f(static_cast<Float16*>(run->data) + place, run->stride, count); break;
      case RunType::kFloat64: f(static_cast<double*>(run->data) + place, run->stride, count); break;
    }
  }
}

template <class Norm>
inline void add_span(const Run* runs, const RunSpan& span, Totals& totals) {
  for_each_piece(runs, span,
                 [&](const auto* x, int64_t stride, int64_t count) { add_elements<Norm>(x, stride, count, totals); });
}

NormPart norm(const Run* runs, const RunSpan& span, NormKind kind, double power) {
  Totals totals;
  switch (kind) {
    case NormKind::kSum: add_span<Sum>(runs, span, totals); break;
    case NormKind::kSumOfSquares: add_span<SumOfSquares>(runs, span, totals); break;
    case NormKind::kSumOfCubes: add_span<SumOfCubes>(runs, span, totals); break;
    case NormKind::kMaximum: add_span<Maximum>(runs, span, totals); break;
    case NormKind::kSumOfPowers:
      for_each_piece(runs, span, [&](const auto* x, int64_t stride, int64_t count) {
        add_powers(x, stride, count, power, totals);
      });
      break;
  }
  double value = totals.last_value, finite = totals.last_finite;
  for (int u = 0; u < 4; ++u) {
    for (int i = 0; i < kDoubles; ++i) {
      value = kind == NormKind::kMaximum ? max_of(value, totals.value[u][i]) : value + totals.value[u][i];
      finite += totals.finite[u][i];
    }
  }
  return {value, finite != 0.0};
}

DSKERNELS_NOINLINE void scale_elements(float* x, int64_t stride, int64_t count, double factor) {
  const float f = static_cast<float>(factor);
  int64_t i = 0;
  for (; stride == 1 && i + kLanes <= count; i += kLanes) store(x + i, f * load(x + i));
  for (; i < count; ++i) x[i * stride] *= f;
}

inline void scale_elements(double* x, int64_t stride, int64_t count, double factor) {
  for (int64_t i = 0; i < count; ++i) x[i * stride] *= factor;
}

template <class T>
DSKERNELS_NOINLINE void scale_elements(T* x, int64_t stride, int64_t count, double factor) {
  constexpr int64_t kBlock = 512;
  float block[kBlock];
  for (int64_t i = 0; i < count; i += kBlock) {
    const int64_t size = min_of(kBlock, count - i);
    load_row_as<T>(x + i * stride, stride, size, block);
    store_row_as<T>(block, static_cast<float>(factor), size, x + i * stride, stride);
  }
}

void scale(const Run* runs, const RunSpan& span, double factor) {
  for_each_piece(runs, span, [&](auto* x, int64_t stride, int64_t count) { scale_elements(x, stride, count, factor); });
}

}  // namespace

namespace DSKERNELS_TIER {

extern const ClipAndScaleKernels clip_and_scale_kernels;
const ClipAndScaleKernels clip_and_scale_kernels = {norm, scale};

}  // namespace DSKERNELS_TIER
}  // namespace dskernels
