// dskernels._C: loading it registers the compiled kernels with torch; what it exports only describes them.
// Of torch's headers nothing but the bundled pybind11 is used here, so that the library outlives torch upgrades.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "common/capability.h"
#include "common/tensor_table_host.h"
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

pybind11::tuple tensor_table(const pybind11::list& tensors, const pybind11::type& tensor_type) {
  const dskernels::TensorTable table =
      dskernels::tensor_table(tensors.ptr(), reinterpret_cast<PyTypeObject*>(tensor_type.ptr()));
  const auto pick = [&](const std::vector<int64_t>& places) {
    pybind11::list picked(places.size());
    for (size_t i = 0; i < places.size(); ++i) {
      PyList_SET_ITEM(picked.ptr(), i, Py_NewRef(PyList_GET_ITEM(tensors.ptr(), places[i])));
    }
    return picked;
  };
  const auto* bytes = reinterpret_cast<const char*>(table.runs.data());
  return pybind11::make_tuple(pybind11::bytearray(bytes, table.runs.size() * sizeof(dskernels::Run)),
                              pick(table.in_table), table.rest);
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
  m.def("tensor_table", &tensor_table, pybind11::arg("tensors"), pybind11::arg("tensor_type"),
        "The memory of a list's tensors as int64 [runs, 4] in bytes, for the table_ operators; these tensors; and the "
        "places in the list of what has to be taken in another way.");
}
