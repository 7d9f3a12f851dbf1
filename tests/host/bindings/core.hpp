// The dispatcher with the rows of instances.def, and divisors.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "flash_cute/core/dispatch.hpp"
#include "flash_cute/core/divisor.hpp"

namespace flash_cute::host {

namespace py = pybind11;

// The rows of instances.def: pass, family, head dims of q and k and of v, variant.
inline std::vector<std::tuple<Pass, Family, int, int, Variant>> instances() {
  return {
#define FLASH_CUTE_PAIR(pass, family, head_dim, head_dim_v, variant, ...) \
  {Pass::pass, Family::family, head_dim, head_dim_v, Variant::variant},
#define FLASH_CUTE_INSTANCE(pass, family, head_dim, ...) \
  FLASH_CUTE_PAIR(pass, family, head_dim, head_dim, __VA_ARGS__, )
#include "flash_cute/instances.def"
  };
}

// Does a row of instances.def compile this kernel? list: forward_kernels or backward_kernels.
template <class Kernel, class List>
bool is_listed(Pass of, Kernel const& kernel, List&& list) {
  for (auto const& [pass, family, head_dim, head_dim_v, variant] : instances()) {
    if (pass != of) continue;
    for (ElementType const element : {ElementType::bf16, ElementType::fp32}) {
      for (Kernel const& listed : list(family, HeadDims{head_dim, head_dim_v}, element, variant))
        if (listed == kernel) return true;
    }
  }
  return false;
}

inline void bind_core(py::module_& module) {
  py::enum_<Pass>(module, "Pass").value("forward", Pass::forward).value("backward", Pass::backward);
  py::enum_<Variant>(module, "Variant")
      .value("plain", Variant::plain)
      .value("split", Variant::split)
      .value("general", Variant::general);
  py::enum_<Family>(module, "Family").value("sm80", Family::sm80).value("sm90", Family::sm90);
  py::enum_<ElementType>(module, "ElementType")
      .value("fp16", ElementType::fp16)
      .value("bf16", ElementType::bf16);

  // Of an int, which both have, or of a pair.
  py::class_<HeadDims>(module, "HeadDims")
      .def(py::init(&both))
      .def(py::init([](std::pair<int, int> const& widths) { return HeadDims{widths.first, widths.second}; }));
  py::implicitly_convertible<py::int_, HeadDims>();
  py::implicitly_convertible<py::tuple, HeadDims>();

  module.def("instances", &instances);

  // The compiled head dims that serve a problem; 0 if there are none.
  module.def("bucket", [](Pass pass, Family family, ElementType element, int head_dim, int head_dim_v) {
    std::pair<int, int> bucket{};
    HeadDims const dims{head_dim, head_dim_v};
    auto keep = [&]<class Instance>(Instance) { bucket = {Instance::head_dim, Instance::head_dim_v}; };
    bool const found = pass == Pass::forward
                           ? visit_instance<Pass::forward>(family, element, Variant::plain, dims, keep)
                           : visit_instance<Pass::backward>(family, element, Variant::plain, dims, keep);
    return found ? bucket : std::pair{0, 0};
  });

  py::class_<Divisor>(module, "Divisor")
      .def(py::init<int>())
      .def("quotient", &Divisor::quotient)
      .def("remainder", &Divisor::remainder);
}

}  // namespace flash_cute::host
