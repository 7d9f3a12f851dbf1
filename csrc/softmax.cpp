// The operators of softmax: schemas, checks, and the way to the CPU's kernels (flash_cute/row_softmax.py).
#include "softmax.hpp"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <array>
#include <cmath>
#include <limits>

namespace flash_cute {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;
using MaybeTensor = std::optional<Tensor>;

SoftmaxResult softmax_cpu(Tensor const& x, SoftmaxOptions const& options) {
  std::array stack{from(x), from(options.scale), from(options.causal), from(options.seqused_k),
                   from(options.leftpad_k)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("flash_cute::_softmax_cpu", "", stack.data(), TORCH_ABI_VERSION));
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1])};
}

Tensor softmax_backward_cpu(MaybeTensor const& dprobabilities, MaybeTensor const& dlse, Tensor const& kept,
                            SoftmaxOptions const& options) {
  std::array stack{from(dprobabilities),   from(dlse),           from(kept),
                   from(options.scale),    from(options.causal), from(options.seqused_k),
                   from(options.leftpad_k)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("flash_cute::_softmax_backward_cpu", "", stack.data(), TORCH_ABI_VERSION));
  return to<Tensor>(stack[0]);
}

template <auto function>
SoftmaxResult forward(Tensor x, double scale, bool causal, MaybeTensor seqused_k, MaybeTensor leftpad_k) {
  SoftmaxOptions const options{scale, causal, seqused_k, leftpad_k};
  validate_softmax(x, options);
  return function(x, options);
}

template <auto function>
Tensor backward(MaybeTensor dprobabilities, MaybeTensor dlse, Tensor kept, double scale, bool causal,
                MaybeTensor seqused_k, MaybeTensor leftpad_k) {
  return function(dprobabilities, dlse, kept, {scale, causal, seqused_k, leftpad_k});
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

void validate_softmax(Tensor const& x, SoftmaxOptions const& options) {
  constexpr int64_t kMaxColumns = int64_t(1) << 28;
  ScalarType const type = x.scalar_type();
  require(type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16,
          "x has dtype ", torch::headeronly::toString(type),
          "; torch.float32, torch.float16 and torch.bfloat16 are accepted");
  bool const has_lengths = options.seqused_k || options.leftpad_k;
  int64_t const dims = x.dim(), needed = 1 + has_lengths + options.causal;
  require(dims >= needed, "x has ", dims, " dimensions; at least ", needed,
          has_lengths
              ? (options.causal ? ", (batch, ..., rows, columns), are accepted with causal and lengths"
                                : ", (batch, ..., columns), are accepted with lengths")
          : options.causal ? ", (..., rows, columns), are accepted with causal"
                           : ", (..., columns), is accepted");
  int64_t rows = 1;
  for (int64_t dim = 0; dim + 1 < dims; ++dim) rows *= x.size(dim);
  require(rows < std::numeric_limits<int>::max(), "x has ", rows, " rows; fewer than 2**31 - 1 are accepted");
  require(x.size(dims - 1) <= kMaxColumns, "x has ", x.size(dims - 1), " columns; at most ", kMaxColumns,
          " are accepted");
  require(std::isfinite(float(options.scale)) && float(options.scale) > 0.f, "scale is ", options.scale,
          "; a finite number > 0 is accepted");
  for (auto const& [name, length] :
       {std::pair{"seqused_k", &options.seqused_k}, {"leftpad_k", &options.leftpad_k}}) {
    if (!*length) continue;
    Tensor const& tensor = **length;
    require(tensor.scalar_type() == ScalarType::Int, name, " has dtype ",
            torch::headeronly::toString(tensor.scalar_type()), "; torch.int32 is accepted");
    require(tensor.device() == x.device(), name, " is on device ", name_of(tensor.device()), " and x on ",
            name_of(x.device()), "; they must be the same");
    require(tensor.dim() == 1 && tensor.size(0) == x.size(0), name, " has ", tensor.numel(), " elements in ",
            tensor.dim(), " dimensions; (", x.size(0), ",), as the batch is, is accepted");
    require(tensor.size(0) <= 1 || tensor.stride(0) == 1, name, " has stride ", tensor.stride(0),
            "; a contiguous tensor is accepted");
  }
}

#ifndef FLASH_CUTE_WITH_CUDA

SoftmaxResult softmax_cuda(Tensor const&, SoftmaxOptions const&) {
  throw std::runtime_error(
      "flash_cute.softmax: x is on a GPU, but this flash_cute was built without CUDA; install it again where "
      "torch has CUDA and without FLASH_CUTE_CPU_ONLY");
}
Tensor softmax_backward_cuda(MaybeTensor const&, MaybeTensor const&, Tensor const& x,
                             SoftmaxOptions const& options) {
  return std::get<0>(softmax_cuda(x, options));
}

#endif

}  // namespace flash_cute

#define FLASH_CUTE_SOFTMAX \
  "float scale=1.0, bool causal=False, Tensor? seqused_k=None, Tensor? leftpad_k=None) "
#define FLASH_CUTE_SOFTMAX_RESULTS "-> (Tensor probabilities, Tensor lse)"
#define FLASH_CUTE_SOFTMAX_GRADIENTS "Tensor? dprobabilities, Tensor? dlse, Tensor kept, "

STABLE_TORCH_LIBRARY_FRAGMENT(flash_cute, library) {
  library.def("_softmax(Tensor x, " FLASH_CUTE_SOFTMAX FLASH_CUTE_SOFTMAX_RESULTS);
  library.def("_softmax_backward(" FLASH_CUTE_SOFTMAX_GRADIENTS FLASH_CUTE_SOFTMAX "-> Tensor");
  library.def("_softmax_cpu(Tensor x, " FLASH_CUTE_SOFTMAX FLASH_CUTE_SOFTMAX_RESULTS);
  library.def("_softmax_backward_cpu(" FLASH_CUTE_SOFTMAX_GRADIENTS FLASH_CUTE_SOFTMAX "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, library) {
  library.impl("_softmax", TORCH_BOX(&flash_cute::forward<flash_cute::softmax_cuda>));
  library.impl("_softmax_backward", TORCH_BOX(&flash_cute::backward<flash_cute::softmax_backward_cuda>));
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CPU, library) {
  library.impl("_softmax", TORCH_BOX(&flash_cute::forward<flash_cute::softmax_cpu>));
  library.impl("_softmax_backward", TORCH_BOX(&flash_cute::backward<flash_cute::softmax_backward_cpu>));
}
