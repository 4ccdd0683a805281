#include "common/capability.h"

#include <atomic>
#include <cctype>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace dskernels {
namespace {

// The features that CMakeLists.txt allows the compiler to use in the tier, no fewer.
bool cpu_runs(Tier tier) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  switch (tier) {
    case Tier::DEFAULT: return true;
    case Tier::AVX2: return avx2;
    case Tier::AVX512:
      return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512vnni");
  }
#endif
  return tier == Tier::DEFAULT;
}

// `source` names the value in the error.
Tier find_tier(const char* source, const std::string& name) {
  std::string wanted = name, names;
  for (char& c : wanted) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  for (const Tier tier : available_tiers()) {
    if (wanted == tier_name(tier)) return tier;
    names += (names.empty() ? "" : ", ") + std::string(tier_name(tier));
  }
  throw std::invalid_argument(std::string(source) + ": expected one of " + names +
                              " (what this build holds and this CPU runs), got '" + name + "'");
}

std::atomic<Tier>& current_tier() {
  static std::atomic<Tier> tier = [] {
    const char* variable = std::getenv("DSKERNELS_CPU_TIER");
    const bool is_set = variable != nullptr && *variable != '\0';
    return is_set ? find_tier("DSKERNELS_CPU_TIER", variable) : available_tiers().back();
  }();
  return tier;
}

}  // namespace

const char* tier_name(Tier tier) {
  switch (tier) {
    case Tier::AVX512: return "AVX512";
    case Tier::AVX2: return "AVX2";
    default: return "DEFAULT";
  }
}

std::vector<Tier> available_tiers() {
  std::vector<Tier> available;
  for (const Tier tier : {Tier::DEFAULT, DSKERNELS_IF_AVX2(Tier::AVX2, ) DSKERNELS_IF_AVX512(Tier::AVX512)}) {
    if (cpu_runs(tier)) available.push_back(tier);
  }
  return available;
}

Tier cpu_tier() { return current_tier(); }

void set_cpu_tier(const std::string& name) { current_tier() = find_tier("tier", name); }

}  // namespace dskernels
