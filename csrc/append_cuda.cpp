// append_kv on a GPU: tensors to params, the launch.
#include "append.hpp"

#ifdef FLASH_CUTE_WITH_CUDA

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "device.hpp"
#include "kernels.hpp"
#include "tensors.hpp"

namespace flash_cute {
namespace {

template <class T>
T const* pointer(std::optional<Tensor> const& tensor) {
  return tensor ? static_cast<T const*>(tensor->const_data_ptr()) : nullptr;
}

// A table whose rows a kernel can read in chunks: itself, or a copy.
Tensor table(char const* name, Tensor const& given) {
  Tensor const dense = as_contiguous(name, given);
  bool const aligned = reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % kRowAlignment == 0;
  if (aligned) return dense;
  Tensor copy = allocate(name, dense, dense.sizes(), dense.scalar_type());
  torch::stable::copy_(copy, dense);
  return copy;
}

TensorView view_of_cache(Tensor cache) {
  cache.mutable_data_ptr();  // one that is copied on write has memory of its own from here on
  auto const strides = cache.strides();
  return {const_cast<void*>(cache.const_data_ptr()), strides[0], strides[1], strides[2]};
}

}  // namespace

Tensor append_kv_cuda(AppendArguments const& arguments) {
  AppendProblem const problem = validate(arguments);
  int const device_index = arguments.k.get_device_index();
  torch::stable::accelerator::DeviceGuard const guard(device_index);
  std::optional<Target> rotated;
  if (arguments.q)
    rotated.emplace("a copy of the rotated q", allocate_like("the rotated q", *arguments.q), false);
  Tensor const result = rotated ? rotated->result : torch::stable::new_empty(arguments.k, {0});
  if (problem.is_empty()) return result;

  AppendParams params{};
  params.tokens = {.entries = problem.entries,
                   .rows = Divisor(larger(problem.rows_q, problem.rows_k)),
                   .rows_q = problem.rows_q,
                   .rows_k = problem.rows_k,
                   .heads_q = problem.heads_q,
                   .heads_kv = problem.heads_kv,
                   .cu_seqlens = pointer<int>(arguments.cu_seqlens)};
  params.cache = {.sequences = problem.sequences,
                  .cache_seqlens = pointer<int>(arguments.cache_seqlens),
                  .table = pointer<int>(arguments.block_table),
                  .table_stride = arguments.block_table ? arguments.block_table->stride(0) : 0,
                  .width = problem.page_size > 0 ? problem.width : 0,  // of nothing, nothing is written
                  .pages = problem.pages,
                  .page_size = Divisor(larger(1, problem.page_size)),
                  .slots = pointer<int64_t>(arguments.slots),
                  .slot_count = arguments.slots ? arguments.slots->size(0) : -1};
  params.head_dim = problem.head_dim;
  params.head_dim_v = problem.head_dim_v;
  int const chunks = problem.widest() * element_bytes(problem.element) / kAppendChunkBytes;
  params.pairs = Divisor(ceil_div(chunks, 2));
  params.device = gpu_at(device_index).info;

  std::optional<Tensor> cos, sin;
  if (problem.rotary_dim > 0) {
    cos = table("a copy of rotary_cos", *arguments.rotary_cos);
    sin = table("a copy of rotary_sin", *arguments.rotary_sin);
    auto const& positions = arguments.positions;
    params.rotary = {.cos = cos->const_data_ptr(),
                     .sin = sin->const_data_ptr(),
                     .positions = pointer<int64_t>(positions),
                     .positions_stride = positions && positions->dim() == 2 ? positions->stride(0) : 0,
                     .length = problem.rotary_length,
                     .dim = problem.rotary_dim,
                     .interleaved = arguments.rotary_interleaved,
                     .is_fp32 = problem.rotary_is_fp32};
  }
  Readable const k = readable("a copy of k", arguments.k, false),
                 v = readable("a copy of v", arguments.v, false);
  params.k = k.view();
  params.v = v.view();
  params.k_cache = view_of_cache(arguments.k_cache);
  params.v_cache = view_of_cache(arguments.v_cache);
  params.is_fp8 = problem.is_fp8;
  params.k_scale = cache_scale(arguments.k_scale);
  params.v_scale = cache_scale(arguments.v_scale);
  std::optional<Readable> q;
  if (rotated) {
    params.q = q.emplace(readable("a copy of q", *arguments.q, false)).view();
    params.rotated_q = rotated->view();
  }
  append_kv_launch(problem.element)(params, current_stream(device_index));
  if (rotated) rotated->finish();
  return result;
}

}  // namespace flash_cute

#endif
