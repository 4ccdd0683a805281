// dskernels._C: loading it registers the compiled kernels with torch; what it exports only describes them.
// Of torch's headers nothing but the bundled pybind11 is used here, so that the library outlives torch upgrades.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "common/capability.h"
#include "dskernels_build_info.h"

namespace {

std::vector<std::string> names_of(const std::vector<dskernels::Tier>& tiers) {
  std::vector<std::string> names;
  for (const dskernels::Tier tier : tiers) names.emplace_back(dskernels::tier_name(tier));
  return names;
}

pybind11::dict build_info() {
  pybind11::dict info;
  info["version"] = DSKERNELS_VERSION;
  info["torch"] = DSKERNELS_TORCH_VERSION;
  info["compiler"] = DSKERNELS_COMPILER;
  info["cpu_tiers"] = std::vector<std::string>{DSKERNELS_CPU_TIERS};
  info["cpu_tiers_here"] = names_of(dskernels::available_tiers());
  info["cuda_archs"] = std::vector<std::string>{DSKERNELS_CUDA_ARCHS};
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled kernels of dskernels; importing this module registers them.";
  m.def("build_info", &build_info,
        "What was compiled: version, torch built against, compiler, CPU tiers (built; built and runnable here), "
        "CUDA architectures.");
  m.def(
      "cpu_tier", [] { return dskernels::tier_name(dskernels::cpu_tier()); },
      "The CPU tier in use. ValueError when DSKERNELS_CPU_TIER names one that cannot run here.");
  m.def(
      "cpu_tiers", [] { return names_of(dskernels::available_tiers()); },
      "The CPU tiers that this build holds and this CPU runs, lowest first.");
  m.def("set_cpu_tier", &dskernels::set_cpu_tier, pybind11::arg("tier"),
        "Puts the calls that follow on a tier of cpu_tiers(), as DSKERNELS_CPU_TIER does at import.");
}
