// The operators: one schema each, and which function serves it on which device.
#include <torch/csrc/stable/library.h>

#include "forward.hpp"

namespace flash_cute {
namespace {

using MaybeTensor = std::optional<Tensor>;

// These give a function of AttentionArguments the signature of a schema.
template <auto function>
auto padded(Tensor q, Tensor k, Tensor v, bool causal, std::optional<double> softmax_scale,
            std::optional<int64_t> window_left, std::optional<int64_t> window_right, MaybeTensor seqused_q,
            MaybeTensor seqused_k, MaybeTensor leftpad_k, std::optional<std::string> family) {
  return function({q,
                   k,
                   v,
                   {causal, softmax_scale, window_left, window_right, family},
                   {{}, {}, seqused_q, seqused_k, leftpad_k}});
}

template <auto function>
auto packed(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, MaybeTensor cu_seqlens_k, bool causal,
            std::optional<double> softmax_scale, std::optional<int64_t> window_left,
            std::optional<int64_t> window_right, MaybeTensor seqused_q, MaybeTensor seqused_k,
            MaybeTensor leftpad_k, std::optional<std::string> family) {
  return function({q,
                   k,
                   v,
                   {causal, softmax_scale, window_left, window_right, family},
                   {cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k}});
}

template <auto function>
auto either(Tensor q, Tensor k, Tensor v, bool causal, std::optional<double> softmax_scale,
            std::optional<int64_t> window_left, std::optional<int64_t> window_right, MaybeTensor cu_seqlens_q,
            MaybeTensor cu_seqlens_k, MaybeTensor seqused_q, MaybeTensor seqused_k, MaybeTensor leftpad_k,
            std::optional<std::string> family) {
  return function({q,
                   k,
                   v,
                   {causal, softmax_scale, window_left, window_right, family},
                   {cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k}});
}

using MaybeSizes = std::optional<std::vector<int64_t>>;

// The checks of the forward for tensors of which only this is known; dtypes, devices and steps (strides) of
// the tensors of lengths are those of the ones given, in this order.
void check_traced(std::vector<int64_t> q, std::vector<int64_t> k, std::vector<int64_t> v,
                  std::vector<ScalarType> dtypes, std::vector<Device> devices, std::vector<int64_t> steps,
                  bool causal, std::optional<double> softmax_scale, std::optional<int64_t> window_left,
                  std::optional<int64_t> window_right, MaybeSizes cu_seqlens_q, MaybeSizes cu_seqlens_k,
                  MaybeSizes seqused_q, MaybeSizes seqused_k, MaybeSizes leftpad_k,
                  std::optional<std::string> family) {
  LengthOperands lengths;
  size_t index = 0, given = 0;
  for (MaybeSizes const* sizes : {&cu_seqlens_q, &cu_seqlens_k, &seqused_q, &seqused_k, &leftpad_k}) {
    if (sizes->has_value()) {
      lengths[index].emplace(Operand{kLengthNames[index], **sizes, dtypes.at(3 + given),
                                     devices.at(3 + given), steps.at(given)});
      ++given;
    }
    ++index;
  }
  validate({"q", q, dtypes.at(0), devices.at(0)}, {"k", k, dtypes.at(1), devices.at(1)},
           {"v", v, dtypes.at(2), devices.at(2)}, {causal, softmax_scale, window_left, window_right, family},
           lengths);
}

}  // namespace
}  // namespace flash_cute

#define FLASH_CUTE_TENSORS "Tensor q, Tensor k, Tensor v, "
#define FLASH_CUTE_OFFSETS "Tensor cu_seqlens_q, Tensor? cu_seqlens_k=None, "
#define FLASH_CUTE_OPTIONS                                                              \
  "bool causal=False, *, float? softmax_scale=None, SymInt? window_left=None, SymInt? " \
  "window_right=None, "
#define FLASH_CUTE_LENGTHS(type) type "? seqused_q=None, " type "? seqused_k=None, " type "? leftpad_k=None, "
#define FLASH_CUTE_MAYBE_OFFSETS(type) type "? cu_seqlens_q=None, " type "? cu_seqlens_k=None, "
#define FLASH_CUTE_FAMILY "str? family=None) "
#define FLASH_CUTE_RESULTS "-> (Tensor out, Tensor lse)"
#define FLASH_CUTE_PADDED \
  FLASH_CUTE_TENSORS FLASH_CUTE_OPTIONS FLASH_CUTE_LENGTHS("Tensor") FLASH_CUTE_FAMILY FLASH_CUTE_RESULTS
#define FLASH_CUTE_PACKED                                                               \
  FLASH_CUTE_TENSORS FLASH_CUTE_OFFSETS FLASH_CUTE_OPTIONS FLASH_CUTE_LENGTHS("Tensor") \
      FLASH_CUTE_FAMILY FLASH_CUTE_RESULTS

// forward and forward_varlen are what Python calls and differentiates (flash_cute/ops.py); those with an
// underscore are what they run, and what is left of them in compiled and exported graphs.
STABLE_TORCH_LIBRARY(flash_cute, library) {
  library.def("forward(" FLASH_CUTE_PADDED);
  library.def("_forward(" FLASH_CUTE_PADDED);
  library.def("forward_varlen(" FLASH_CUTE_PACKED);
  library.def("_forward_varlen(" FLASH_CUTE_PACKED);
  library.def("plan(" FLASH_CUTE_TENSORS FLASH_CUTE_OPTIONS FLASH_CUTE_MAYBE_OFFSETS("Tensor")
                  FLASH_CUTE_LENGTHS("Tensor") FLASH_CUTE_FAMILY "-> str");
  library.def("compiled() -> str");
  library.def(
      "_check(int[] q, int[] k, int[] v, ScalarType[] dtypes, Device[] devices, int[] "
      "steps, " FLASH_CUTE_OPTIONS FLASH_CUTE_MAYBE_OFFSETS("int[]") FLASH_CUTE_LENGTHS("int[]")
          FLASH_CUTE_FAMILY "-> ()");
  library.def(
      "_forward_cpu(Tensor q, Tensor k, Tensor v, float softmax_scale, int window_left, int window_right, "
      "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
      "Tensor? leftpad_k=None) " FLASH_CUTE_RESULTS);
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, library) {
  library.impl("_forward", TORCH_BOX(&flash_cute::padded<flash_cute::forward_cuda>));
  library.impl("_forward_varlen", TORCH_BOX(&flash_cute::packed<flash_cute::forward_cuda>));
  library.impl("plan", TORCH_BOX(&flash_cute::either<flash_cute::plan_cuda>));
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CPU, library) {
  library.impl("_forward", TORCH_BOX(&flash_cute::padded<flash_cute::forward_cpu>));
  library.impl("_forward_varlen", TORCH_BOX(&flash_cute::packed<flash_cute::forward_cpu>));
  library.impl("plan", TORCH_BOX(&flash_cute::either<flash_cute::plan_cpu>));
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, library) {
  library.impl("compiled", TORCH_BOX(&flash_cute::compiled_kernels));
  library.impl("_check", TORCH_BOX(&flash_cute::check_traced));
}
