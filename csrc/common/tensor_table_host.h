// How a table of memory runs is made; for the host module alone, since it needs Python's headers.
#pragma once

#include <Python.h>

#include <vector>

#include "common/tensor_table.h"

namespace dskernels {

struct TensorTable {
  std::vector<Run> runs;
  // The places in the list of what the table holds, and of what has to be taken in another way: subclasses of the
  // tensor type, tensors that are not dense on the CPU, that are no floats, whose elements share memory. None and an
  // object that came before are in neither.
  std::vector<int64_t> in_table, rest;
};

TensorTable tensor_table(PyObject* list, PyTypeObject* tensor_type);

}  // namespace dskernels
