// The forward on a GPU: tensors to params, copies, the launch; what explain and supported tell.
#include "forward.hpp"
#include "json.hpp"

#ifdef FLASH_CUTE_WITH_CUDA

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <limits>

#include "device.hpp"
#include "planned_call.hpp"
#include "tensors.hpp"

namespace flash_cute {
namespace {

ForwardCall plan_call(AttentionArguments const& arguments) {
  AttentionProblem const problem = validate(arguments);  // before the device, of which it may complain
  std::optional<Tensor> const& table = arguments.lengths.block_table;
  return plan_forward_call(
      problem, length_params(arguments.lengths, problem.cached), gpu_at(arguments.q.get_device_index()),
      table ? static_cast<int const*>(table->const_data_ptr()) : nullptr, table ? table->stride(0) : 0);
}

}  // namespace

ForwardResult forward_cuda(AttentionArguments const& arguments) {
  auto const& [q_whole, k_whole, v_whole, options, lengths, ranges, given_out, given_sinks, mask, bias,
               alibi_slopes, dropout_seed, k_scale, v_scale] = arguments;
  ForwardCall call = plan_call(arguments);
  int const device_index = q_whole.get_device_index();
  torch::stable::accelerator::DeviceGuard const guard(device_index);
  ForwardParams& params = call.params;
  ProblemShape const& shape = params.shape;
  bool const varlen = call.launch.kernel.seqlens == Seqlens::varlen, packed = call.problem.packed;

  Tensor out = given_out ? *given_out : allocate_out(q_whole, v_whole);
  int32_t const float32 = aoti_torch_dtype_float32();
  Tensor lse =
      packed ? allocate("lse", q_whole, float32, sizeof(float), {shape.heads_q, shape.seqlen_q})
             : allocate("lse", q_whole, float32, sizeof(float), {shape.batch, shape.heads_q, shape.seqlen_q});
  if (!call.launches) {
    if (lse.numel() > 0) {
      require(!given_sinks, "k must have a row beside sinks, got shape ", ShapeOf{k_whole.sizes()});
      torch::stable::zero_(out);
      torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
    }
    return {out, lse};
  }

  int const unreachable = call.unreachable();
  Readable const q = readable("a copy of q", q_whole, varlen);
  bool const whole_rows = varlen && !call.launch.splits();  // see reason_to_copy
  Readable const k = readable("a copy of k", k_whole, whole_rows, unreachable);
  Readable const v = readable("a copy of v", v_whole, whole_rows, unreachable);
  Target target("a copy of out", out, varlen);  // of a layout that the kernels may not be able to write
  params.q = q.view();
  params.k = k.view();
  params.v = v.view();
  params.out = target.view();
  params.lse = static_cast<float*>(lse.mutable_data_ptr());
  std::optional<Tensor> sinks;
  if (given_sinks) params.sinks = sink_params(sinks.emplace(as_contiguous("a copy of sinks", *given_sinks)));

  params.cache.k_scale = cache_scale(k_scale);
  params.cache.v_scale = cache_scale(v_scale);
  if (ranges) params.ranges = range_params(ranges);
  bool const takes_tiles = has_bias_tiles(call.problem, lengths) &&
                           call.launch.kernel.takes_bias_tiles(call.kernel.family, call.kernel.bucket);
  ScoreTensors const score_tensors(arguments, takes_tiles, params.pair_mask, params.scores);

  std::optional<Tensor> workspace;
  if (int64_t const bytes = call.launch.workspace.bytes; bytes > 0)
    workspace = allocate("the workspace", out, aoti_torch_dtype_uint8(), 1, {bytes});
  call.run(workspace ? workspace->mutable_data_ptr() : nullptr, current_stream(device_index));
  target.finish();
  return {out, lse};
}

std::string plan_cuda(AttentionArguments const& arguments) {
  ForwardCall const call = plan_call(arguments);
  torch::stable::accelerator::DeviceGuard const guard(arguments.q.get_device_index());
  auto const& [problem, kernel, params, mask, launches, launch] = call;
  KernelAttributes const attributes = kernel.attributes(launch);

  std::vector<std::string> copies = reasons_to_copy(arguments, launch.kernel.seqlens == Seqlens::varlen);
  bool const takes_tiles = has_bias_tiles(problem, arguments.lengths) &&
                           launch.kernel.takes_bias_tiles(kernel.family, kernel.bucket);
  if (arguments.bias && copies_bias(*arguments.bias, takes_tiles)) copies.push_back(kReasonToCopyBias);
  JsonObject plan;
  plan.add("family", name_of(kernel.family))
      .add("element", name_of(problem.element))
      .add("copies", copies)
      .add("bucket", kernel.bucket.qk)
      .add("bucket_v", kernel.bucket.v)
      .add("block_m", launch.kernel.tile.block_m)
      .add("block_n", launch.kernel.tile.block_n)
      .add("stages", launch.kernel.tile.stages)
      .add("packed_heads", int(launch.rows.heads.value))
      .add("threads", attributes.threads)
      .add("registers", attributes.registers)
      .add("local_bytes", attributes.local_bytes)
      .add("smem_bytes", attributes.smem_bytes)
      .add("grid", launches ? launch.blocks : 0)
      .add("splits", launch.splits())
      .add("partial_results", launches ? launch.split.slots : 0)
      .add("workspace_bytes", launches ? launch.workspace.bytes : 0)
      .add("seqlen_k_used", params.shape.seqlen_k);
  return add_problem(plan, problem).text();
}

std::string compiled_kernels() {
  std::string list;
  for (auto const& [pass, family, element, head_dims, variant, compiled] : compiled_instances()) {
    JsonObject kernel;
    kernel.add("pass", name_of(pass))
        .add("family", name_of(family))
        .add("element", name_of(element))
        .add("head_dim", head_dims.qk)
        .add("head_dim_v", head_dims.v)
        .add("variant", name_of(variant));
    if (compiled) {
      ForwardTile const& tile = compiled->tile;
      JsonObject shape;
      shape.add("block_m", tile.block_m)
          .add("block_n", tile.block_n)
          .add("stages", tile.stages)
          .add("warps", tile.warps);
      kernel.add_raw("tile", shape.text()).add("smem_bytes", compiled->smem_bytes);
    }
    list += (list.empty() ? "" : ", ") + kernel.text();
  }
  return '[' + list + ']';
}

}  // namespace flash_cute

#else

namespace flash_cute {

ForwardResult forward_cuda(AttentionArguments const&) { refuse_gpu("q"); }
std::string plan_cuda(AttentionArguments const&) { refuse_gpu("q"); }
std::string compiled_kernels() { return "[]"; }

}  // namespace flash_cute

#endif
