// The operators of softmax: schemas and checks. The CPU's kernels are in flash_cute/_cpu/softmax.py.
#include "softmax.hpp"

#include <torch/csrc/stable/library.h>

#include <limits>
#include <vector>

namespace flash_cute {
namespace {

using MaybeTensor = std::optional<Tensor>;

std::optional<Operand> operand(char const* name, MaybeTensor const& tensor) {
  if (!tensor) return std::nullopt;
  return Operand{name, tensor->sizes(), tensor->scalar_type(), tensor->device(),
                 tensor->dim() == 1 ? tensor->stride(0) : 1};
}

void require_stored(std::optional<Operand> const& operand, MaybeTensor const& tensor) {
  if (operand) flash_cute::require_stored(*operand, *tensor);
}

void validate(Tensor const& x, SoftmaxOptions const& options) {
  Operand const scores = *operand("x", x);
  auto const used = operand("seqused_k", options.seqused_k),
             skipped = operand("leftpad_k", options.leftpad_k);
  validate_softmax(scores, options.scale, options.causal, used, skipped);
  flash_cute::require_stored(scores, x);
  require_stored(used, options.seqused_k);
  require_stored(skipped, options.leftpad_k);
}

template <auto function>
auto forward(Tensor x, double scale, bool causal, MaybeTensor seqused_k, MaybeTensor leftpad_k) {
  SoftmaxOptions const options{scale, causal, seqused_k, leftpad_k};
  validate(x, options);
  return function(x, options);
}

template <auto function>
auto backward(MaybeTensor dprobabilities, MaybeTensor dlse, Tensor kept, double scale, bool causal,
              MaybeTensor seqused_k, MaybeTensor leftpad_k) {
  SoftmaxOptions const options{scale, causal, seqused_k, leftpad_k};
  validate(kept, options);
  auto const first = operand("dprobabilities", dprobabilities), second = operand("dlse", dlse);
  validate_softmax_backward(*operand("x", kept), first, second);
  require_stored(first, dprobabilities);
  require_stored(second, dlse);
  return function(dprobabilities, dlse, kept, options);
}

// The CPU's kernels themselves are Python's, which call these checks.
void softmax_cpu(Tensor const&, SoftmaxOptions const&) {}
void softmax_backward_cpu(MaybeTensor const&, MaybeTensor const&, Tensor const&, SoftmaxOptions const&) {}

using MaybeSizes = std::optional<std::vector<int64_t>>;

// The checks of a call by what is known of its tensors while it is traced, or for one sample of vmap: sizes,
// and of those that are given, in this order, dtypes, devices and strides.
void check_traced(std::vector<int64_t> x, std::vector<ScalarType> dtypes, std::vector<Device> devices,
                  std::vector<int64_t> steps, double scale, bool causal, MaybeSizes seqused_k,
                  MaybeSizes leftpad_k, MaybeSizes dprobabilities, MaybeSizes dlse) {
  size_t next = 0;
  auto operand = [&](char const* name, MaybeSizes const& sizes) -> std::optional<Operand> {
    if (!sizes) return std::nullopt;
    Operand const found{name, *sizes, dtypes.at(next), devices.at(next), steps.at(next)};
    ++next;
    return found;
  };
  MaybeSizes const sizes = x;
  Operand const kept = *operand("x", sizes);
  auto const used = operand("seqused_k", seqused_k), skipped = operand("leftpad_k", leftpad_k);
  validate_softmax(kept, scale, causal, used, skipped);
  auto const first = operand("dprobabilities", dprobabilities), second = operand("dlse", dlse);
  validate_softmax_backward(kept, first, second);
}

}  // namespace

ScoreShape score_shape(IntHeaderOnlyArrayRef sizes, bool has_lengths) {
  int64_t const dims = int64_t(sizes.size());
  bool const has_rows = dims > (has_lengths ? 2 : 1);
  int64_t const batch = has_lengths ? sizes[0] : 1, rows = has_rows ? sizes[dims - 2] : 1;
  int64_t heads = 1;
  for (int64_t dim = has_lengths; dim < dims - 1 - has_rows; ++dim) heads *= sizes[dim];
  return {int(batch), int(heads), int(rows), int(sizes[dims - 1])};
}

void validate_softmax(Operand const& x, double scale, bool causal, std::optional<Operand> const& seqused_k,
                      std::optional<Operand> const& leftpad_k) {
  require(x.type == ScalarType::Float || x.type == ScalarType::Half || x.type == ScalarType::BFloat16,
          "x has dtype ", DtypeOf{x.type}, "; torch.float32, torch.float16 and torch.bfloat16 are accepted");
  bool const has_lengths = seqused_k || leftpad_k;
  int64_t const dims = x.sizes.size(), needed = 1 + has_lengths + causal;
  require(dims >= needed, "x has ", dims, " dimensions; at least ", needed,
          has_lengths ? (causal ? ", (batch, ..., rows, columns), are accepted with causal and lengths"
                                : ", (batch, ..., columns), are accepted with lengths")
          : causal    ? ", (..., rows, columns), are accepted with causal"
                      : ", (..., columns), is accepted");
  int64_t rows = 1;
  for (int64_t dim = 0; dim + 1 < dims; ++dim) rows *= x.sizes[dim];
  require(rows < std::numeric_limits<int>::max(), "x has ", rows, " rows; fewer than 2**31 - 1 are accepted");
  require(x.sizes[dims - 1] <= kMaxLength, "x has ", x.sizes[dims - 1], " columns; at most ", kMaxLength,
          " are accepted");
  require_scale("scale", scale);
  for (auto const& length : {seqused_k, leftpad_k}) {
    if (!length) continue;
    require_type(*length, ScalarType::Int);
    require_same_device(*length, x);
    require_entries(*length, x.sizes[0], x.sizes[0]);
  }
}

void validate_softmax_backward(Operand const& kept, std::optional<Operand> const& dprobabilities,
                               std::optional<Operand> const& dlse) {
  auto const check = [&](Operand const& gradient, size_t dims, ScalarType type) {
    bool same = gradient.sizes.size() == dims;
    for (size_t dim = 0; same && dim < dims; ++dim) same = gradient.sizes[dim] == kept.sizes[dim];
    require(same, gradient.name, " has another shape than the result that it is the gradient of");
    require_type(gradient, type);
    require_same_device(gradient, kept);
  };
  if (dprobabilities) check(*dprobabilities, kept.sizes.size(), kept.type);
  if (dlse) check(*dlse, kept.sizes.size() - 1, ScalarType::Float);
}

#ifndef FLASH_CUTE_WITH_CUDA

SoftmaxResult softmax_cuda(Tensor const&, SoftmaxOptions const&) { refuse_gpu("x"); }
Tensor softmax_backward_cuda(MaybeTensor const&, MaybeTensor const&, Tensor const&, SoftmaxOptions const&) {
  refuse_gpu("x");
}

#endif

}  // namespace flash_cute

#define FLASH_CUTE_SOFTMAX \
  "float scale=1.0, bool causal=False, Tensor? seqused_k=None, Tensor? leftpad_k=None) "
#define FLASH_CUTE_SOFTMAX_RESULTS "-> (Tensor probabilities, Tensor lse)"
#define FLASH_CUTE_SOFTMAX_GRADIENTS "Tensor? dprobabilities, Tensor? dlse, Tensor kept, "

STABLE_TORCH_LIBRARY_FRAGMENT(flash_cute, library) {
  library.def("softmax(Tensor x, " FLASH_CUTE_SOFTMAX FLASH_CUTE_SOFTMAX_RESULTS);
  library.def("_softmax(Tensor x, " FLASH_CUTE_SOFTMAX FLASH_CUTE_SOFTMAX_RESULTS);
  library.def("_softmax_backward(" FLASH_CUTE_SOFTMAX_GRADIENTS FLASH_CUTE_SOFTMAX "-> Tensor");
  library.def(
      "_softmax_check(int[] x, ScalarType[] dtypes, Device[] devices, int[] steps, float scale, bool causal, "
      "int[]? seqused_k=None, int[]? leftpad_k=None, int[]? dprobabilities=None, int[]? dlse=None) -> ()");
  library.def("_softmax_cpu(Tensor x, " FLASH_CUTE_SOFTMAX "-> ()");
  library.def("_softmax_backward_cpu(" FLASH_CUTE_SOFTMAX_GRADIENTS FLASH_CUTE_SOFTMAX "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, library) {
  library.impl("_softmax", TORCH_BOX(&flash_cute::forward<flash_cute::softmax_cuda>));
  library.impl("_softmax_backward", TORCH_BOX(&flash_cute::backward<flash_cute::softmax_backward_cuda>));
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CPU, library) {
  library.impl("_softmax_cpu", TORCH_BOX(&flash_cute::forward<flash_cute::softmax_cpu>));
  library.impl("_softmax_backward_cpu", TORCH_BOX(&flash_cute::backward<flash_cute::softmax_backward_cpu>));
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, library) {
  library.impl("_softmax_check", TORCH_BOX(&flash_cute::check_traced));
}
