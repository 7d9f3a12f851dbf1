// Softmax on a GPU: tensors to params, the launch.
#ifdef FLASH_CUTE_WITH_CUDA

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "device.hpp"
#include "kernels.hpp"
#include "softmax.hpp"
#include "tensors.hpp"

namespace flash_cute {
namespace {

// A tensor of this shape as the kernels read it: itself, or a contiguous copy where columns don't lie one
// behind the other, or heads are several dimensions whose strides are not one.
struct ScoreRows {
  Tensor tensor;
  TensorView view;

  ScoreRows(char const* copy, Tensor const& whole, ScoreShape const& shape, bool has_lengths)
      : tensor(whole) {
    if (!set_view(shape, has_lengths)) {
      tensor = as_contiguous(copy, whole);
      set_view(shape, has_lengths);
    }
  }

 private:
  bool set_view(ScoreShape const& shape, bool has_lengths) {
    int64_t const dims = tensor.dim(), has_rows = dims > (has_lengths ? 2 : 1);
    if (shape.columns > 1 && tensor.stride(dims - 1) != 1) return false;
    int64_t stride = 0, size = 1;  // of the heads so far, from the innermost dimension on
    for (int64_t dim = dims - 2 - has_rows; dim >= has_lengths; --dim) {
      if (tensor.size(dim) == 1) continue;
      if (size > 1 && tensor.stride(dim) != stride * size) return false;
      if (size == 1) stride = tensor.stride(dim);
      size *= tensor.size(dim);
    }
    view = {const_cast<void*>(tensor.const_data_ptr()), shape.batch > 1 ? tensor.stride(0) : 0, stride,
            has_rows && shape.rows > 1 ? tensor.stride(dims - 2) : 0};
    return true;
  }
};

RowSoftmaxParams make_params(Tensor const& x, SoftmaxOptions const& options, ScoreRows const& input) {
  auto pointer = [](std::optional<Tensor> const& tensor) {
    return tensor ? static_cast<int const*>(tensor->const_data_ptr()) : nullptr;
  };
  RowSoftmaxParams params{};
  params.shape = score_shape(x.sizes(), options.seqused_k || options.leftpad_k);
  params.input = input.view;
  params.scale = float(options.scale);
  params.mask = {options.causal, pointer(options.seqused_k), pointer(options.leftpad_k)};
  params.device = gpu_at(x.get_device_index()).info;
  return params;
}

// Runs params on x's device and its current stream.
void run(Tensor const& x, RowSoftmaxParams& params, bool backward) {
  SoftmaxKernels const kernels = softmax_kernels(element_of(x.scalar_type()));
  RowSoftmaxPlan const plan = kernels.plan(params, backward);
  std::optional<Tensor> workspace;
  if (plan.workspace_bytes > 0) {
    workspace = allocate("the workspace", x, aoti_torch_dtype_uint8(), 1, {plan.workspace_bytes});
    params.workspace = workspace->mutable_data_ptr();
  }
  (backward ? kernels.backward : kernels.forward)(params, plan, current_stream(x.get_device_index()));
}

}  // namespace

SoftmaxResult softmax_cuda(Tensor const& x, SoftmaxOptions const& options) {
  torch::stable::accelerator::DeviceGuard const guard(x.get_device_index());
  bool const has_lengths = options.seqused_k || options.leftpad_k;
  ScoreShape const shape = score_shape(x.sizes(), has_lengths);
  Tensor probabilities = allocate("probabilities", x, x.sizes(), x.scalar_type());
  Tensor lse = allocate("lse", x, {x.sizes().data(), size_t(x.dim() - 1)}, ScalarType::Float);
  if (lse.numel() == 0) return {probabilities, lse};
  ScoreRows const input("a copy of x", x, shape, has_lengths);
  RowSoftmaxParams params = make_params(x, options, input);
  params.output = ScoreRows("", probabilities, shape, has_lengths).view;
  params.lse = static_cast<float*>(lse.mutable_data_ptr());
  run(x, params, /*backward=*/false);
  return {probabilities, lse};
}

Tensor softmax_backward_cuda(std::optional<Tensor> const& dprobabilities, std::optional<Tensor> const& dlse,
                             Tensor const& kept, SoftmaxOptions const& options) {
  torch::stable::accelerator::DeviceGuard const guard(kept.get_device_index());
  bool const has_lengths = options.seqused_k || options.leftpad_k;
  ScoreShape const shape = score_shape(kept.sizes(), has_lengths);
  Tensor dscores = allocate("the gradient of x", kept, kept.sizes(), kept.scalar_type());
  if (dscores.numel() == 0) return dscores;
  ScoreRows const input("a copy of x", kept, shape, has_lengths);
  RowSoftmaxParams params = make_params(kept, options, input);
  params.output = ScoreRows("", dscores, shape, has_lengths).view;
  std::optional<ScoreRows> gradient;
  if (dprobabilities)
    params.gradient = gradient.emplace("a copy of dprobabilities", *dprobabilities, shape, has_lengths).view;
  std::optional<Tensor> dlse_rows;
  if (dlse) {
    dlse_rows = as_contiguous("a copy of dlse", *dlse);
    params.dlse = static_cast<float const*>(dlse_rows->const_data_ptr());
  }
  run(kept, params, /*backward=*/true);
  return dscores;
}

}  // namespace flash_cute

#endif
