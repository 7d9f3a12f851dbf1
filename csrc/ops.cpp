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
  return function({q, k, v, {causal, softmax_scale, window_left, window_right, family}});
}

// The checks of forward for tensors of which only this is known.
void check_traced(std::vector<int64_t> q, std::vector<int64_t> k, std::vector<int64_t> v,
                  std::vector<ScalarType> dtypes, std::vector<Device> devices, bool causal,
                  std::optional<double> softmax_scale, std::optional<int64_t> window_left,
                  std::optional<int64_t> window_right, std::optional<std::string> family) {
  validate({"q", q, dtypes.at(0), devices.at(0)}, {"k", k, dtypes.at(1), devices.at(1)},
           {"v", v, dtypes.at(2), devices.at(2)}, {causal, softmax_scale, window_left, window_right, family});
}

}  // namespace
}  // namespace flash_cute

#define FLASH_CUTE_TENSORS "Tensor q, Tensor k, Tensor v, "
#define FLASH_CUTE_OPTIONS                                                              \
  "bool causal=False, *, float? softmax_scale=None, SymInt? window_left=None, SymInt? " \
  "window_right=None, str? family=None)"

// forward is what Python calls and differentiates (flash_cute/ops.py); _forward is what it runs, and what is
// left of it in compiled and exported graphs.
STABLE_TORCH_LIBRARY(flash_cute, library) {
  library.def("forward(" FLASH_CUTE_TENSORS FLASH_CUTE_OPTIONS " -> (Tensor out, Tensor lse)");
  library.def("_forward(" FLASH_CUTE_TENSORS FLASH_CUTE_OPTIONS " -> (Tensor out, Tensor lse)");
  library.def("plan(" FLASH_CUTE_TENSORS FLASH_CUTE_OPTIONS " -> str");
  library.def("compiled() -> str");
  library.def("_check(int[] q, int[] k, int[] v, ScalarType[] dtypes, Device[] devices, " FLASH_CUTE_OPTIONS
              " -> ()");
  library.def(
      "_forward_cpu(Tensor q, Tensor k, Tensor v, float softmax_scale, int window_left, int window_right) -> "
      "(Tensor out, Tensor lse)");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, library) {
  library.impl("_forward", TORCH_BOX(&flash_cute::unpacked<flash_cute::forward_cuda>));
  library.impl("plan", TORCH_BOX(&flash_cute::unpacked<flash_cute::plan_cuda>));
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CPU, library) {
  library.impl("_forward", TORCH_BOX(&flash_cute::unpacked<flash_cute::forward_cpu>));
  library.impl("plan", TORCH_BOX(&flash_cute::unpacked<flash_cute::plan_cpu>));
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, library) {
  library.impl("compiled", TORCH_BOX(&flash_cute::compiled_kernels));
  library.impl("_check", TORCH_BOX(&flash_cute::check_traced));
}
