// Softmax by itself as XLA calls it.
#include <limits>

#include "ffi.hpp"
#include "flash_cute/softmax/plan.hpp"

namespace flash_cute {
namespace {

constexpr char kSoftmax[] = "flash_cute.jax.softmax";

ScoreShape score_shape(int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
  at_most(std::numeric_limits<int>::max() - 1, batch * heads * rows, "rows");
  return {int(batch), int(heads), int(rows), at_most(kMaxLength, columns, "columns")};
}

// Softmax of rows, contiguous: (..., rows, columns) with causal, else (..., columns). Lengths tell the batch.
struct SoftmaxCall {
  RowSoftmaxParams params{};
  SoftmaxKernels kernels;

  SoftmaxCall(int device, Buffer const& x, Buffer const& seqused_k, Buffer const& leftpad_k, float scale,
              bool causal)
      : kernels(softmax_kernels(element_of(x))) {
    auto const sizes = x.dimensions();
    size_t const dims = sizes.size(), counted = larger(seqused_k.element_count(), leftpad_k.element_count());
    int64_t const columns = sizes[dims - 1], all_rows = int64_t(x.element_count()) / columns;
    int64_t const batch = counted > 0 ? int64_t(counted) : 1;
    int64_t const rows = causal ? sizes[dims - 2] : all_rows / batch, heads = all_rows / batch / rows;
    params.shape = score_shape(batch, heads, rows, columns);
    params.scale = scale;
    params.mask = {causal, lengths(seqused_k), lengths(leftpad_k)};
    params.device = current_gpu(device).info;
    params.input = view(x);
  }

  TensorView view(Buffer const& buffer) const {
    int64_t const columns = params.shape.columns, rows = params.shape.rows;
    return {buffer.untyped_data(), params.shape.heads * rows * columns, rows * columns, columns};
  }
  void run(cudaStream_t stream, Result& workspace, bool backward) {
    RowSoftmaxPlan const plan = kernels.plan(params, backward);
    params.workspace = workspace_of(workspace, plan.workspace_bytes);
    (backward ? kernels.backward : kernels.forward)(params, plan, stream);
  }
};

ffi::Error softmax(cudaStream_t stream, int device, Buffer x, Buffer seqused_k, Buffer leftpad_k,
                   Result probabilities, Result lse, Result workspace, float scale, bool causal) {
  return guarded(kSoftmax, [&] {
    SoftmaxCall call(device, x, seqused_k, leftpad_k, scale, causal);
    call.params.output = call.view(*probabilities);
    call.params.lse = static_cast<float*>(lse->untyped_data());
    call.run(stream, workspace, /*backward=*/false);
  });
}

ffi::Error softmax_backward(cudaStream_t stream, int device, Buffer dprobabilities, Buffer dlse, Buffer kept,
                            Buffer seqused_k, Buffer leftpad_k, Result dx, Result workspace, float scale,
                            bool causal) {
  return guarded(kSoftmax, [&] {
    SoftmaxCall call(device, kept, seqused_k, leftpad_k, scale, causal);
    call.params.gradient = call.view(dprobabilities);
    call.params.output = call.view(*dx);
    call.params.dlse = static_cast<float const*>(dlse.untyped_data());
    call.run(stream, workspace, /*backward=*/true);
  });
}

}  // namespace

// Bytes of the workspace, as in attention_ffi.cpp.
extern "C" int64_t flash_cute_jax_softmax_workspace(bool backward, int64_t rows, int64_t columns,
                                                    int element_bytes) {
  try {
    return row_softmax_workspace(score_shape(1, 1, rows, columns), element_bytes, backward);
  } catch (std::exception const&) {
    return 0;
  }
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(flash_cute_jax_softmax, softmax,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Buffer>()  // x
                                  .Arg<Buffer>()  // seqused_k
                                  .Arg<Buffer>()  // leftpad_k
                                  .Ret<Buffer>()  // probabilities
                                  .Ret<Buffer>()  // lse
                                  .Ret<Buffer>()  // workspace
                                  .Attr<float>("scale")
                                  .Attr<bool>("causal"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(flash_cute_jax_softmax_backward, softmax_backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Buffer>()  // dprobabilities
                                  .Arg<Buffer>()  // dlse
                                  .Arg<Buffer>()  // kept: x or probabilities, see keeps_scores
                                  .Arg<Buffer>()  // seqused_k
                                  .Arg<Buffer>()  // leftpad_k
                                  .Ret<Buffer>()  // dx
                                  .Ret<Buffer>()  // workspace
                                  .Attr<float>("scale")
                                  .Attr<bool>("causal"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace flash_cute
