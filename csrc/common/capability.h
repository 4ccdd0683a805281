// Which instruction-set tier the CPU kernels of this process run on, and how a binding picks its kernels by it.
#pragma once

#include <string>
#include <vector>

namespace dskernels {

// Ordered: a CPU that runs one tier runs those before it.
enum class Tier { DEFAULT, AVX2, AVX512 };

const char* tier_name(Tier tier);

// The tiers that this build contains and this CPU can run, lowest first.
std::vector<Tier> available_tiers();

// The tier in use: the highest available one, or the one that DSKERNELS_CPU_TIER names.
// Throws std::invalid_argument when the variable names a tier that is not available.
Tier cpu_tier();

// Puts the calls that follow on the tier of this name, as the variable would: tests run every tier in one process.
void set_cpu_tier(const std::string& name);

}  // namespace dskernels

// CMakeLists.txt defines DSKERNELS_HAS_<TIER> for each tier it compiles besides DEFAULT.
#ifdef DSKERNELS_HAS_AVX2
#define DSKERNELS_IF_AVX2(...) __VA_ARGS__
#else
#define DSKERNELS_IF_AVX2(...)
#endif
#ifdef DSKERNELS_HAS_AVX512
#define DSKERNELS_IF_AVX512(...) __VA_ARGS__
#else
#define DSKERNELS_IF_AVX512(...)
#endif

// Inside namespace dskernels: declares the table of type `Kernels` that each tier's cpu_vec.cpp defines as `name`.
#define DSKERNELS_DECLARE_TIERS(Kernels, name)                     \
  namespace DEFAULT {                                              \
  extern const Kernels name;                                       \
  }                                                                \
  DSKERNELS_IF_AVX2(namespace AVX2 { extern const Kernels name; }) \
  DSKERNELS_IF_AVX512(namespace AVX512 { extern const Kernels name; })

// Inside namespace dskernels: the table of the tier in use.
#define DSKERNELS_SELECT_TIER(name)                                           \
  ([]() -> const auto& {                                                      \
    DSKERNELS_IF_AVX512(if (cpu_tier() == Tier::AVX512) return AVX512::name;) \
    DSKERNELS_IF_AVX2(if (cpu_tier() == Tier::AVX2) return AVX2::name;)       \
    return DEFAULT::name;                                                     \
  }())
