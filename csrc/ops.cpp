// The operators: one schema each, and which function serves it on which device.
#include <torch/csrc/stable/library.h>

#include "forward.hpp"

namespace flash_cute {
namespace {

// Gives a function of ForwardArguments the signature of the schema.
template <auto function>
auto unpacked(Tensor q, Tensor k, Tensor v, bool causal, std::optional<double> softmax_scale,
              std::optional<int64_t> window_left, std::optional<int64_t> window_right,
              std::optional<std::string> family) {
  return function({q, k, v, causal, softmax_scale, window_left, window_right, family});
}

}  // namespace
}  // namespace flash_cute

#define FLASH_CUTE_FORWARD_ARGUMENTS                                                                        \
  "(Tensor q, Tensor k, Tensor v, bool causal=False, *, float? softmax_scale=None, int? window_left=None, " \
  "int? window_right=None, str? family=None)"

STABLE_TORCH_LIBRARY(flash_cute, library) {
  library.def("forward" FLASH_CUTE_FORWARD_ARGUMENTS " -> (Tensor out, Tensor lse)");
  library.def("plan" FLASH_CUTE_FORWARD_ARGUMENTS " -> str");
  library.def("compiled() -> str");
  library.def(
      "_forward_cpu(Tensor q, Tensor k, Tensor v, float softmax_scale, int window_left, int window_right) -> "
      "(Tensor out, Tensor lse)");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, library) {
  library.impl("forward", TORCH_BOX(&flash_cute::unpacked<flash_cute::forward_cuda>));
  library.impl("plan", TORCH_BOX(&flash_cute::unpacked<flash_cute::plan_cuda>));
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CPU, library) {
  library.impl("forward", TORCH_BOX(&flash_cute::unpacked<flash_cute::forward_cpu>));
  library.impl("plan", TORCH_BOX(&flash_cute::unpacked<flash_cute::plan_cpu>));
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, library) {
  library.impl("compiled", TORCH_BOX(&flash_cute::compiled_kernels));
}
