// The kernels as XLA calls them: handlers of its foreign function interface (flash_cute/jax.py registers
// them). Shapes and options were checked there.
#include <cuda_runtime_api.h>
#include <xla/ffi/api/ffi.h>

#include <cmath>
#include <string>

#include "../kernels.hpp"
#include "flash_cute/backward/plan.hpp"
#include "flash_cute/forward/plan.hpp"

namespace flash_cute {
namespace {

namespace ffi = xla::ffi;

// (..., seqlen, heads, head_dim), contiguous; what vmap maps over comes before the batch.
struct Sizes {
  int batch = 1, seqlen, heads, head_dim;

  explicit Sizes(ffi::AnyBuffer const& buffer) {
    auto const sizes = buffer.dimensions();
    size_t const dims = sizes.size();
    for (size_t dim = 0; dim + 3 < dims; ++dim) batch *= int(sizes[dim]);
    seqlen = int(sizes[dims - 3]);
    heads = int(sizes[dims - 2]);
    head_dim = int(sizes[dims - 1]);
  }
  TensorView view(void* data) const {
    int64_t const row = int64_t(heads) * head_dim;
    return {data, batch > 1 ? seqlen * row : 0, head_dim, row};
  }
};

TensorView view(ffi::AnyBuffer const& buffer) { return Sizes(buffer).view(buffer.untyped_data()); }

int const* lengths(ffi::AnyBuffer const& buffer) {  // empty: they were not given
  return buffer.element_count() > 0 ? static_cast<int const*>(buffer.untyped_data()) : nullptr;
}

struct Call {
  Gpu const& gpu;
  ProblemShape shape;
  ElementType element;
  WindowMask mask;  // limits of -1: none
  LengthParams lengths;

  Call(int device, ffi::AnyBuffer const& q, ffi::AnyBuffer const& k, ffi::AnyBuffer const& seqused_q,
       ffi::AnyBuffer const& seqused_k, ffi::AnyBuffer const& leftpad_k, int64_t left, int64_t right)
      : gpu(gpu_at(device)),
        element(q.element_type() == ffi::DataType::F16 ? ElementType::fp16 : ElementType::bf16) {
    check(cudaSetDevice(device), "choosing the device");
    Sizes const of_q(q), of_k(k);
    shape = {of_q.batch, of_q.heads, of_k.heads, of_q.seqlen, of_k.seqlen, of_q.head_dim};
    int64_t const unlimited = int64_t(shape.seqlen_q) + shape.seqlen_k;
    mask = WindowMask::make(shape.seqlen_q, shape.seqlen_k, left < 0 ? unlimited : left,
                            right < 0 ? unlimited : right);
    lengths.seqused_q = flash_cute::lengths(seqused_q);
    lengths.seqused_k = flash_cute::lengths(seqused_k);
    lengths.leftpad_k = flash_cute::lengths(leftpad_k);
    lengths.given = lengths.seqused_q || lengths.seqused_k || lengths.leftpad_k;
  }

  template <class Params>
  void set(Params& params) const {
    params.shape = shape;
    params.mask = mask;
    params.device = gpu.info;
    params.lengths = lengths;
    params.lse_batch_stride = int64_t(shape.heads_q) * shape.seqlen_q;
  }
};

// Calls function() and turns what it throws into an error of XLA's.
template <class Function>
ffi::Error guarded(Function&& function) {
  try {
    return function();
  } catch (std::exception const& error) {
    return ffi::Error::Internal(error.what());
  }
}

ffi::Error no_kernel(int head_dim) {
  return ffi::Error::Internal("flash_cute.jax: this build has no kernel for head_dim " +
                              std::to_string(head_dim));
}

void* allocate(ffi::ScratchAllocator& scratch, int64_t bytes) {
  constexpr size_t kAlignment = 256;
  std::optional<void*> const memory = scratch.Allocate(size_t(bytes), kAlignment);
  if (!memory) {
    throw std::runtime_error("flash_cute.jax: out of memory: " + std::to_string(bytes) +
                             " bytes for the workspace could not be allocated");
  }
  return *memory;
}

ffi::Error forward(cudaStream_t stream, int device, ffi::ScratchAllocator scratch, ffi::AnyBuffer q,
                   ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer seqused_q, ffi::AnyBuffer seqused_k,
                   ffi::AnyBuffer leftpad_k, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                   float scale, int64_t left, int64_t right) {
  return guarded([&] {
    Call const call(device, q, k, seqused_q, seqused_k, leftpad_k, left, right);
    Family const family = default_family(call.gpu, call.element, call.shape.head_dim);
    ForwardKernel const kernel = forward_kernel(family, call.element, call.shape.head_dim);
    if (!kernel.run) return no_kernel(call.shape.head_dim);
    ForwardParams params{};
    call.set(params);
    params.softmax = {scale * float(M_LOG2E)};
    params.q = view(q);
    params.k = view(k);
    params.v = view(v);
    params.out = view(*out);
    params.lse = static_cast<float*>(lse->untyped_data());
    ForwardPlan const plan = plan_forward(kernel.family, kernel.head_dim, params);
    if (plan.workspace_bytes > 0) params.lengths.workspace = allocate(scratch, plan.workspace_bytes);
    kernel.run(params, plan, stream);
    return ffi::Error::Success();
  });
}

ffi::Error backward(cudaStream_t stream, int device, ffi::ScratchAllocator scratch, ffi::AnyBuffer dout,
                    ffi::AnyBuffer dlse, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                    ffi::AnyBuffer out, ffi::AnyBuffer lse, ffi::AnyBuffer seqused_q,
                    ffi::AnyBuffer seqused_k, ffi::AnyBuffer leftpad_k, ffi::Result<ffi::AnyBuffer> dq,
                    ffi::Result<ffi::AnyBuffer> dk, ffi::Result<ffi::AnyBuffer> dv, float scale, int64_t left,
                    int64_t right, bool deterministic) {
  return guarded([&] {
    Call const call(device, q, k, seqused_q, seqused_k, leftpad_k, left, right);
    BackwardKernel const kernel = backward_kernel(Family::sm80, call.element, call.shape.head_dim);
    if (!kernel.run) return no_kernel(call.shape.head_dim);
    BackwardParams params{};
    call.set(params);
    params.softmax_scale = scale;
    params.q = view(q);
    params.k = view(k);
    params.v = view(v);
    params.out = view(out);
    params.dout = view(dout);
    params.dq = view(*dq);
    params.dk = view(*dk);
    params.dv = view(*dv);
    params.lse = static_cast<float const*>(lse.untyped_data());
    params.dlse = static_cast<float const*>(dlse.untyped_data());
    BackwardPlan const plan =
        plan_backward(kernel.family, kernel.head_dim, params, true, true, deterministic);
    params.workspace = plan.parts(allocate(scratch, plan.workspace_bytes));
    kernel.run(params, plan, stream);
    return ffi::Error::Success();
  });
}

// Softmax of rows, contiguous: (..., rows, columns) with causal, else (..., columns). Lengths tell the batch.
struct SoftmaxCall {
  RowSoftmaxParams params{};
  SoftmaxKernels kernels;

  SoftmaxCall(int device, ffi::AnyBuffer const& x, ffi::AnyBuffer const& seqused_k,
              ffi::AnyBuffer const& leftpad_k, float scale, bool causal)
      : kernels(softmax_kernels(element_of(x))) {
    check(cudaSetDevice(device), "choosing the device");
    auto const sizes = x.dimensions();
    size_t const dims = sizes.size(), counted = larger(seqused_k.element_count(), leftpad_k.element_count());
    int64_t const columns = sizes[dims - 1], all_rows = int64_t(x.element_count()) / columns;
    int64_t const batch = counted > 0 ? int64_t(counted) : 1;
    int64_t const rows = causal ? sizes[dims - 2] : all_rows / batch, heads = all_rows / batch / rows;
    params.shape = {int(batch), int(heads), int(rows), int(columns)};
    params.scale = scale;
    params.mask = {causal, lengths(seqused_k), lengths(leftpad_k)};
    params.device = gpu_at(device).info;
    params.input = view(x);
  }

  TensorView view(ffi::AnyBuffer const& buffer) const {
    int64_t const columns = params.shape.columns, rows = params.shape.rows;
    return {buffer.untyped_data(), params.shape.heads * rows * columns, rows * columns, columns};
  }
  void run(cudaStream_t stream, ffi::ScratchAllocator& scratch, bool backward) {
    RowSoftmaxPlan const plan = kernels.plan(params, backward);
    if (plan.workspace_bytes > 0) params.workspace = allocate(scratch, plan.workspace_bytes);
    (backward ? kernels.backward : kernels.forward)(params, plan, stream);
  }

 private:
  static RowElement element_of(ffi::AnyBuffer const& x) {
    switch (x.element_type()) {
      case ffi::DataType::F16: return RowElement::fp16;
      case ffi::DataType::BF16: return RowElement::bf16;
      default: return RowElement::fp32;
    }
  }
};

ffi::Error softmax(cudaStream_t stream, int device, ffi::ScratchAllocator scratch, ffi::AnyBuffer x,
                   ffi::AnyBuffer seqused_k, ffi::AnyBuffer leftpad_k,
                   ffi::Result<ffi::AnyBuffer> probabilities, ffi::Result<ffi::AnyBuffer> lse, float scale,
                   bool causal) {
  return guarded([&] {
    SoftmaxCall call(device, x, seqused_k, leftpad_k, scale, causal);
    call.params.output = call.view(*probabilities);
    call.params.lse = static_cast<float*>(lse->untyped_data());
    call.run(stream, scratch, /*backward=*/false);
    return ffi::Error::Success();
  });
}

ffi::Error softmax_backward(cudaStream_t stream, int device, ffi::ScratchAllocator scratch,
                            ffi::AnyBuffer dprobabilities, ffi::AnyBuffer dlse, ffi::AnyBuffer kept,
                            ffi::AnyBuffer lse, ffi::AnyBuffer seqused_k, ffi::AnyBuffer leftpad_k,
                            ffi::Result<ffi::AnyBuffer> dx, float scale, bool causal) {
  return guarded([&] {
    SoftmaxCall call(device, kept, seqused_k, leftpad_k, scale, causal);
    call.params.gradient = call.view(dprobabilities);
    call.params.output = call.view(*dx);
    call.params.lse = static_cast<float*>(lse.untyped_data());
    call.params.dlse = static_cast<float const*>(dlse.untyped_data());
    call.run(stream, scratch, /*backward=*/true);
    return ffi::Error::Success();
  });
}

}  // namespace
}  // namespace flash_cute

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(flash_cute_jax_forward, flash_cute::forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .Arg<ffi::AnyBuffer>()  // q
                                  .Arg<ffi::AnyBuffer>()  // k
                                  .Arg<ffi::AnyBuffer>()  // v
                                  .Arg<ffi::AnyBuffer>()  // seqused_q
                                  .Arg<ffi::AnyBuffer>()  // seqused_k
                                  .Arg<ffi::AnyBuffer>()  // leftpad_k
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Ret<ffi::AnyBuffer>()  // lse
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("left")
                                  .Attr<int64_t>("right"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(flash_cute_jax_backward, flash_cute::backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .Arg<ffi::AnyBuffer>()  // dout
                                  .Arg<ffi::AnyBuffer>()  // dlse
                                  .Arg<ffi::AnyBuffer>()  // q
                                  .Arg<ffi::AnyBuffer>()  // k
                                  .Arg<ffi::AnyBuffer>()  // v
                                  .Arg<ffi::AnyBuffer>()  // out
                                  .Arg<ffi::AnyBuffer>()  // lse
                                  .Arg<ffi::AnyBuffer>()  // seqused_q
                                  .Arg<ffi::AnyBuffer>()  // seqused_k
                                  .Arg<ffi::AnyBuffer>()  // leftpad_k
                                  .Ret<ffi::AnyBuffer>()  // dq
                                  .Ret<ffi::AnyBuffer>()  // dk
                                  .Ret<ffi::AnyBuffer>()  // dv
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("left")
                                  .Attr<int64_t>("right")
                                  .Attr<bool>("deterministic"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(flash_cute_jax_softmax, flash_cute::softmax,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // seqused_k
                                  .Arg<ffi::AnyBuffer>()  // leftpad_k
                                  .Ret<ffi::AnyBuffer>()  // probabilities
                                  .Ret<ffi::AnyBuffer>()  // lse
                                  .Attr<float>("scale")
                                  .Attr<bool>("causal"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(flash_cute_jax_softmax_backward, flash_cute::softmax_backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .Arg<ffi::AnyBuffer>()  // dprobabilities
                                  .Arg<ffi::AnyBuffer>()  // dlse
                                  .Arg<ffi::AnyBuffer>()  // x or probabilities, see keeps_scores
                                  .Arg<ffi::AnyBuffer>()  // lse
                                  .Arg<ffi::AnyBuffer>()  // seqused_k
                                  .Arg<ffi::AnyBuffer>()  // leftpad_k
                                  .Ret<ffi::AnyBuffer>()  // dx
                                  .Attr<float>("scale")
                                  .Attr<bool>("causal"));
