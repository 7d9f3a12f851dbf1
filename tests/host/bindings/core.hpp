// The dispatcher with the rows of instances.def, and divisors.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "flash_cute/core/dispatch.hpp"
#include "flash_cute/core/divisor.hpp"

namespace flash_cute::host {

namespace py = pybind11;

// The rows of instances.def: pass, family, head dim, variant.
inline std::vector<std::tuple<Pass, Family, int, Variant>> instances() {
  return {
#define FLASH_CUTE_INSTANCE(pass, family, head_dim, variant, ...) \
  {Pass::pass, Family::family, head_dim, Variant::variant},
#include "flash_cute/instances.def"
  };
}

// Does a row of instances.def compile this kernel? list: forward_kernels or backward_kernels.
template <class Kernel, class List>
bool is_listed(Pass of, Kernel const& kernel, List&& list) {
  for (auto const& [pass, family, head_dim, variant] : instances()) {
    if (pass != of) continue;
    for (ElementType const element : {ElementType::bf16, ElementType::fp32}) {
      for (Kernel const& listed : list(family, head_dim, element, variant))
        if (listed == kernel) return true;
    }
  }
  return false;
}

inline void bind_core(py::module_& module) {
  py::enum_<Pass>(module, "Pass").value("forward", Pass::forward).value("backward", Pass::backward);
  py::enum_<Variant>(module, "Variant").value("plain", Variant::plain);
  py::enum_<Family>(module, "Family").value("sm80", Family::sm80).value("sm90", Family::sm90);
  py::enum_<ElementType>(module, "ElementType")
      .value("fp16", ElementType::fp16)
      .value("bf16", ElementType::bf16);

  module.def("instances", &instances);

  // The compiled head dim that serves a problem; 0 if there is none.
  module.def("bucket", [](Pass pass, Family family, ElementType element, int head_dim) {
    int bucket = 0;
    auto keep = [&]<class Instance>(Instance) { bucket = Instance::head_dim; };
    bool const found = pass == Pass::forward
                           ? visit_instance<Pass::forward>(family, element, Variant::plain, head_dim, keep)
                           : visit_instance<Pass::backward>(family, element, Variant::plain, head_dim, keep);
    return found ? bucket : 0;
  });

  py::class_<Divisor>(module, "Divisor")
      .def(py::init<int>())
      .def("quotient", &Divisor::quotient)
      .def("remainder", &Divisor::remainder);
}

}  // namespace flash_cute::host
