// Plans of the softmax by itself.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "flash_cute/softmax/plan.hpp"

namespace flash_cute::host {

namespace py = pybind11;

inline void bind_softmax(py::module_& module) {
  py::class_<RowTile>(module, "RowTile")
      .def_readonly("chunks", &RowTile::chunks)
      .def_readonly("shared", &RowTile::shared)
      .def_readonly("of_block", &RowTile::of_block)
      .def_readonly("plain_only", &RowTile::plain_only)
      .def("rows", &RowTile::rows)
      .def("capacity", &RowTile::capacity);
  module.def("row_tiles", [](int element_bytes, bool backward) {
    RowTiles const rows = row_tiles(element_bytes, backward);
    return std::vector(rows.tiles, rows.tiles + rows.count);
  });
  py::class_<RowSoftmaxPlan>(module, "RowSoftmaxPlan")
      .def_readonly("tile", &RowSoftmaxPlan::tile)
      .def_readonly("threads", &RowSoftmaxPlan::threads)
      .def_readonly("parts", &RowSoftmaxPlan::parts)
      .def_readonly("teams", &RowSoftmaxPlan::teams)
      .def_readonly("workspace_bytes", &RowSoftmaxPlan::workspace_bytes);
  module.def("plan_row_softmax", [](int rows, int columns, int element_bytes, bool aligned, bool plain,
                                    bool backward, int multiprocessors) {
    return plan_row_softmax({1, 1, rows, columns}, element_bytes, aligned, plain, backward, multiprocessors);
  });
  module.def("row_softmax_workspace", [](int rows, int columns, int element_bytes, bool backward) {
    return row_softmax_workspace({1, 1, rows, columns}, element_bytes, backward);
  });
}

}  // namespace flash_cute::host
