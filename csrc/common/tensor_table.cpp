// Reads a Python list of tensors through DLPack's C exchange API, the stable way to a tensor's memory without a
// dispatcher, and lays its memory runs down in a table.
#include "common/tensor_table.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "common/tensor_table_host.h"

namespace dskernels {
namespace {

// The parts of DLPack 1.x's ABI (dlpack.h of https://github.com/dmlc/dlpack, DLPackExchangeAPI) that are used here.
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  int32_t device_type, device_id, ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct ExchangeApi {
  uint32_t major, minor;
  ExchangeApi* previous;
  void* unused[3];
  int (*describe)(void* object, DLTensor* out);
};
constexpr int32_t kDLCPU = 1;
constexpr uint8_t kDLFloat = 2, kDLBfloat = 4;

// null where torch has none, or one of another generation.
ExchangeApi* exchange_api(PyTypeObject* type) {
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  void* pointer = capsule == nullptr ? nullptr : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  PyErr_Clear();
  Py_XDECREF(capsule);
  auto* api = static_cast<ExchangeApi*>(pointer);
  while (api != nullptr && api->major != 1) api = api->previous;
  return api != nullptr && api->describe != nullptr ? api : nullptr;
}

std::optional<RunType> run_type(const DLDataType& dtype) {
  if (dtype.lanes != 1) return std::nullopt;
  if (dtype.code == kDLBfloat && dtype.bits == 16) return RunType::kBFloat16;
  if (dtype.code != kDLFloat) return std::nullopt;
  switch (dtype.bits) {
    case 16: return RunType::kFloat16;
    case 32: return RunType::kFloat32;
    case 64: return RunType::kFloat64;
    default: return std::nullopt;
  }
}

bool append_strided_runs(const DLTensor& tensor, RunType type, char* data, std::vector<Run>& runs) {
  int64_t count = 1, stride = 1;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int32_t d = 0; d < tensor.ndim; ++d) {
    if (tensor.shape[d] > 1) dims.emplace_back(tensor.strides[d], tensor.shape[d]);
  }
  std::sort(dims.begin(), dims.end());
  // Dims that continue each other are one.
  size_t outer = 0;
  if (!dims.empty()) {
    std::tie(stride, count) = dims[0];
    for (outer = 1; outer < dims.size() && dims[outer].first == stride * count; ++outer) count *= dims[outer].second;
  }
  int64_t extent = 1 + (count - 1) * stride, copies = 1;
  for (size_t d = 0; d < dims.size(); ++d) {
    if (dims[d].first <= 0) return false;
    if (d < outer) continue;
    if (dims[d].first < extent) return false;
    extent += (dims[d].second - 1) * dims[d].first;
    copies *= dims[d].second;
  }
  const int64_t bytes = tensor.dtype.bits / 8;
  for (int64_t copy = 0; copy < copies; ++copy) {
    int64_t rest = copy, place = 0;
    for (size_t d = outer; d < dims.size(); ++d) {
      place += rest % dims[d].second * dims[d].first;
      rest /= dims[d].second;
    }
    runs.push_back({data + place * bytes, count, stride, type});
  }
  return true;
}

// Appends the memory of one tensor; false where elements share memory.
bool append_runs(const DLTensor& tensor, RunType type, std::vector<Run>& runs) {
  char* data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  int64_t dense = 1;
  bool is_dense = true;
  for (int32_t d = tensor.ndim - 1; d >= 0; --d) {
    is_dense &= tensor.shape[d] == 1 || tensor.strides[d] == dense;
    dense *= tensor.shape[d];
  }
  if (dense == 0) return true;
  if (is_dense) {
    runs.push_back({data, dense, 1, type});
    return true;
  }
  return append_strided_runs(tensor, type, data, runs);
}

// The objects of a list that have come before: addresses in a table with room for twice as many.
class Seen {
 public:
  explicit Seen(size_t count) {
    while ((size_t{1} << bits_) < 2 * count) ++bits_;
    places_.resize(size_t{1} << bits_);
  }

  bool insert(const void* object) {
    // Fibonacci hashing: the high bits of a product depend on all bits of the address.
    size_t place = static_cast<size_t>(reinterpret_cast<uintptr_t>(object) * 0x9E3779B97F4A7C15u >> (64 - bits_));
    while (places_[place] != nullptr && places_[place] != object) place = (place + 1) & (places_.size() - 1);
    if (places_[place] == object) return false;
    places_[place] = object;
    return true;
  }

 private:
  int bits_ = 4;
  std::vector<const void*> places_;
};

}  // namespace

TensorTable tensor_table(PyObject* list, PyTypeObject* tensor_type) {
  TensorTable table;
  std::vector<Run>& runs = table.runs;
  ExchangeApi* const api = exchange_api(tensor_type);
  const Py_ssize_t count = PyList_GET_SIZE(list);
  runs.reserve(count);
  table.in_table.reserve(count);
  Seen seen(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const object = PyList_GET_ITEM(list, i);
    if (object == Py_None || !seen.insert(object)) continue;
    DLTensor tensor;
    bool taken = api != nullptr && Py_TYPE(object) == tensor_type;
    if (taken && api->describe(object, &tensor) != 0) {
      PyErr_Clear();
      taken = false;
    }
    const std::optional<RunType> type = taken && tensor.device_type == kDLCPU ? run_type(tensor.dtype) : std::nullopt;
    const bool in_table = type.has_value() && append_runs(tensor, *type, runs);
    (in_table ? table.in_table : table.rest).push_back(i);
  }
  return table;
}

}  // namespace dskernels
