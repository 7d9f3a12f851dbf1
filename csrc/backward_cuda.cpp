// The backward on a GPU: tensors to params, copies, the launch.
#include "backward.hpp"
#include "json.hpp"

#ifdef FLASH_CUTE_WITH_CUDA

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "device.hpp"
#include "planned_call.hpp"
#include "tensors.hpp"

namespace flash_cute {
namespace {

BackwardCall plan_call(AttentionProblem const& problem, BackwardArguments const& arguments) {
  AttentionArguments const& attention = arguments.attention;
  return plan_backward_call(problem, length_params(attention.lengths), gpu_at(attention.q.get_device_index()),
                            arguments.needs_dq, arguments.needs_dkv, arguments.deterministic);
}

// A gradient like `whole`.
struct Gradient : Target {
  Gradient(char const* name, Tensor const& whole, bool varlen, bool zeros)
      : Target(name, allocate_like(name, whole), varlen) {
    if (zeros && result.numel() > 0) torch::stable::zero_(memory);
  }
  explicit Gradient(Tensor const& like)  // not asked for
      : Target(torch::stable::new_empty(like, {0})) {}

  TensorView view(int first) const { return memory.numel() > 0 ? Target::view(first) : TensorView{}; }
};

// Operands where kernels can read them.
class BackwardTensors {
 public:
  // Says where they lie; they must outlive the launch. unreachable: first keys that are not needed.
  BackwardTensors(BackwardArguments const& arguments, bool varlen, int unreachable, bool takes_bias_tiles,
                  BackwardParams& params)
      : q_(readable("a copy of q", arguments.attention.q, varlen)),
        k_(readable("a copy of k", arguments.attention.k, varlen, unreachable)),
        v_(readable("a copy of v", arguments.attention.v, varlen, unreachable)),
        out_(readable("a copy of out", arguments.out, varlen)),
        lse_(as_contiguous("a copy of lse", arguments.lse)),
        scores_(arguments.attention, takes_bias_tiles, params.pair_mask, params.scores) {
    if (arguments.dout)
      params.dout = dout_.emplace(readable("a copy of dout", *arguments.dout, varlen)).view();
    params.q = q_.view();
    params.k = k_.view();
    params.v = v_.view();
    params.out = out_.view();
    params.lse = static_cast<float const*>(lse_.const_data_ptr());
    if (arguments.dlse) {
      dlse_ = as_contiguous("a copy of dlse", *arguments.dlse);
      params.dlse = static_cast<float const*>(dlse_->const_data_ptr());
    }
    if (arguments.attention.ranges) params.ranges = range_params(arguments.attention.ranges);
  }

 private:
  Readable q_, k_, v_, out_;
  Tensor lse_;
  ScoreTensors scores_;
  std::optional<Readable> dout_;
  std::optional<Tensor> dlse_;
};

}  // namespace

BackwardResult backward_cuda(BackwardArguments const& arguments) {
  Tensor const &q_whole = arguments.attention.q, &k_whole = arguments.attention.k,
               &v_whole = arguments.attention.v;
  auto const& given_sinks = arguments.attention.sinks;
  BackwardCall call = plan_call(validate(arguments), arguments);
  int const device_index = q_whole.get_device_index();
  torch::stable::accelerator::DeviceGuard const guard(device_index);
  BackwardParams& params = call.params;
  bool const varlen = params.lengths.given;
  int const unreachable = call.unreachable();

  // Keys that no query reaches are cut off before the launch.
  bool const all_zeros = !call.launches;
  auto gradient = [&](char const* name, Tensor const& like, bool needed, bool zeros) {
    return needed ? Gradient(name, like, varlen, zeros) : Gradient(like);
  };
  Gradient dq = gradient("dq", q_whole, arguments.needs_dq, all_zeros);
  Gradient dk = gradient("dk", k_whole, arguments.needs_dkv, all_zeros || unreachable > 0);
  Gradient dv = gradient("dv", v_whole, arguments.needs_dkv, all_zeros || unreachable > 0);
  Tensor dsinks = given_sinks
                      ? allocate("dsinks", *given_sinks, given_sinks->sizes(), given_sinks->scalar_type())
                      : torch::stable::new_empty(q_whole, {0});
  if (given_sinks && !call.launches && dsinks.numel() > 0) {
    require(arguments.lse.numel() == 0, "k must have a row beside sinks, got shape ",
            ShapeOf{k_whole.sizes()});
    torch::stable::zero_(dsinks);
  }
  if (call.launches) {
    bool const takes_tiles =
        has_bias_tiles(call.problem, arguments.attention.lengths) && call.launch.kernel.tile.has_pair_tiles;
    BackwardTensors const tensors(arguments, varlen, unreachable, takes_tiles, params);
    params.dq = dq.view(0);
    params.dk = dk.view(unreachable);
    params.dv = dv.view(unreachable);
    std::optional<Tensor> sinks, shares;
    if (given_sinks) {
      sinks = as_contiguous("a copy of sinks", *given_sinks);
      shares = allocate("shares of dsinks", q_whole, aoti_torch_dtype_float32(), sizeof(float),
                        {call.params.shape.heads_q, call.launch.q_blocks});
      params.sinks = {sink_params(*sinks), dsinks.mutable_data_ptr(),
                      static_cast<float*>(shares->mutable_data_ptr())};
    }
    Tensor workspace =
        allocate("the workspace", q_whole, aoti_torch_dtype_uint8(), 1, {call.launch.workspace.bytes});
    call.run(workspace.mutable_data_ptr(), current_stream(device_index));
  }
  for (Gradient* written : {&dq, &dk, &dv}) written->finish();
  return {dq.result, dk.result, dv.result, dsinks};
}

namespace {

// dv = P^T dout, of weights P (batch, heads_q, seqlen_q, seqlen_k or more).
void multiply_weights(Tensor const& weights, BackwardArguments const& arguments, Tensor const& dv) {
  auto called = [](char const* name, char const* overload, auto const&... tensors) {
    std::array stack{torch::stable::detail::from(tensors)...};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
  };
  Tensor const& dout = *arguments.dout;
  // 0 for a query that sees nothing, whose dout may be no number.
  Tensor const blind = torch::stable::unsqueeze(called("aten::isneginf", "", arguments.lse), 3);
  Tensor of_out = allocate("a copy of dout", dout, dout.sizes(), dout.scalar_type());
  called("aten::where", "self_out", blind, torch::stable::new_zeros(dout, {1}), dout, of_out);
  // Query heads that share a head of v are rows of one product. Without `out` autocast would cast it.
  int64_t const heads = dv.size(0) * dv.size(1), keys = dv.size(2), columns = dv.size(3);
  Tensor rows = torch::stable::view(weights, {heads, -1, weights.size(3)});
  called("aten::bmm", "out", torch::stable::transpose(torch::stable::narrow(rows, 2, 0, keys), 1, 2),
         torch::stable::view(of_out, {heads, -1, columns}), torch::stable::view(dv, {heads, keys, columns}));
}

}  // namespace

std::tuple<Tensor, Tensor> bias_gradient_cuda(BackwardArguments const& arguments) {
  AttentionProblem const problem = validate_bias_gradient(arguments);
  AttentionArguments const& attention = arguments.attention;
  Tensor const &bias = *attention.bias, &v = attention.v;
  int const device_index = attention.q.get_device_index();
  torch::stable::accelerator::DeviceGuard const guard(device_index);
  PairShape const shape{int(bias.size(0)), int(bias.size(1)), int(bias.size(2)), int(bias.size(3))};
  PairCall call = plan_pair_call(problem, length_params(attention.lengths), gpu_at(device_index), shape);
  Tensor dbias = allocate("dbias", bias, bias.sizes(), bias.scalar_type());
  Tensor dv =
      arguments.needs_dv ? allocate("dv", v, v.sizes(), v.scalar_type()) : torch::stable::new_empty(v, {0});
  bool const multiplies = arguments.needs_dv && arguments.dout && call.launches;
  if (!multiplies && dv.numel() > 0) torch::stable::zero_(dv);
  if (!call.launches) {
    if (dbias.numel() > 0) torch::stable::zero_(dbias);
    return {dbias, dv};
  }
  BackwardTensors const tensors(arguments, /*varlen=*/false, 0, /*takes_bias_tiles=*/false, call.params.call);
  call.params.sums = dbias.mutable_data_ptr();
  std::optional<Tensor> weights;
  if (multiplies) {
    // Rows of a multiple of 16 bytes, which the product reads faster.
    call.params.weights_stride = padded_head_dim(shape.columns, call.params.call.element_bytes);
    std::array<int64_t, 4> const sizes{shape.entries, shape.heads, shape.rows, call.params.weights_stride};
    weights = allocate("the weights", v, {sizes.data(), sizes.size()}, v.scalar_type());
    call.params.weights = weights->mutable_data_ptr();
  }
  Tensor workspace =
      allocate("the workspace", bias, aoti_torch_dtype_uint8(), 1, {call.launch.workspace.bytes});
  call.run(workspace.mutable_data_ptr(), current_stream(device_index));
  if (weights) multiply_weights(*weights, arguments, dv);
  return {dbias, dv};
}

Tensor weights_cuda(BackwardArguments const& arguments) {
  AttentionProblem const problem = validate_weights(arguments);
  AttentionArguments const& attention = arguments.attention;
  Tensor const& q_whole = attention.q;
  int const device_index = q_whole.get_device_index();
  torch::stable::accelerator::DeviceGuard const guard(device_index);
  ProblemShape const& of = problem.shape;
  PairCall call = plan_pair_call(problem, length_params(attention.lengths), gpu_at(device_index),
                                 {of.batch, of.heads_q, of.seqlen_q, of.seqlen_k});
  std::array<int64_t, 4> const sizes{of.batch, of.heads_q, of.seqlen_q, of.seqlen_k};
  Tensor weights = allocate("the weights", q_whole, {sizes.data(), sizes.size()}, q_whole.scalar_type());
  if (!call.launches) {
    if (weights.numel() > 0) torch::stable::zero_(weights);
    return weights;
  }
  BackwardParams& params = call.params.call;
  Readable const q = readable("a copy of q", q_whole, /*varlen=*/false),
                 k = readable("a copy of k", attention.k, /*varlen=*/false);
  Tensor const lse = as_contiguous("a copy of lse", arguments.lse);
  ScoreTensors const scores(attention, /*takes_bias_tiles=*/false, params.pair_mask, params.scores);
  params.q = q.view();
  params.k = k.view();
  params.lse = static_cast<float const*>(lse.const_data_ptr());
  if (attention.ranges) params.ranges = range_params(attention.ranges);
  call.params.weights = weights.mutable_data_ptr();
  call.params.weights_stride = of.seqlen_k;
  Tensor workspace =
      allocate("the workspace", q_whole, aoti_torch_dtype_uint8(), 1, {call.launch.workspace.bytes});
  call.run(workspace.mutable_data_ptr(), current_stream(device_index));
  return weights;
}

// The regions of the workspace and their bytes.
std::string regions_of(BackwardCall const& call) {
  JsonObject regions;
  for (int i = 0; call.launches && i < kWorkspaceRegions; ++i) {
    int64_t const bytes = call.launch.workspace.regions[i].bytes;
    if (bytes > 0) regions.add(kWorkspaceRegionNames[i], bytes);
  }
  return regions.text();
}

// What computes the gradient of the bias, which is asked for by an operator of its own.
std::string bias_gradient_plan(AttentionProblem const& problem, AttentionArguments const& attention) {
  Tensor const& bias = *attention.bias;
  PairShape const shape{int(bias.size(0)), int(bias.size(1)), int(bias.size(2)), int(bias.size(3))};
  PairCall const call = plan_pair_call(problem, length_params(attention.lengths),
                                       gpu_at(attention.q.get_device_index()), shape);
  JsonObject plan;
  plan.add("family", name_of(call.kernel.family))
      .add("workspace_bytes", call.launches ? call.launch.workspace.bytes : 0);
  return plan.text();
}

std::string backward_plan_cuda(BackwardArguments const& arguments) {
  AttentionProblem const problem = validate(arguments.attention);
  validate_keys_of_backward(problem);
  BackwardCall const call = plan_call(problem, arguments);
  torch::stable::accelerator::DeviceGuard const guard(arguments.attention.q.get_device_index());
  KernelAttributes const attributes = call.kernel.attributes(call.launch);
  BackwardTile const& tile = call.launch.kernel.tile;
  std::vector<std::string> copies = reasons_to_copy(arguments.attention, call.params.lengths.given);
  if (arguments.attention.bias &&
      copies_bias(*arguments.attention.bias,
                  has_bias_tiles(problem, arguments.attention.lengths) && tile.has_pair_tiles))
    copies.push_back(kReasonToCopyBias);
  JsonObject plan;
  plan.add("family", name_of(call.kernel.family))
      .add("element", name_of(call.problem.element))
      .add("copies", copies)
      .add("bucket", call.kernel.bucket.qk)
      .add("bucket_v", call.kernel.bucket.v)
      .add("block_m", tile.block_m)
      .add("block_n", tile.block_n)
      .add("stages", tile.stages)
      .add("packed_heads", 1)
      .add("gqa_splits", call.launch.gqa.parts)
      .add_raw("lse_delta_mma", tile.lse_delta_mma ? "true" : "false")
      .add("threads", attributes.threads)
      .add("registers", attributes.registers)
      .add("local_bytes", attributes.local_bytes)
      .add("smem_bytes", attributes.smem_bytes)
      .add("grid", call.launches ? call.launch.blocks : 0)
      .add("workspace_bytes", call.launches ? call.launch.workspace.bytes : 0)
      .add_raw("workspace", regions_of(call))
      .add("seqlen_k_used", call.params.shape.seqlen_k);
  if (arguments.attention.bias)
    plan.add_raw("bias_gradient", bias_gradient_plan(problem, arguments.attention));
  return add_problem(plan, call.problem).text();
}

}  // namespace flash_cute

#else

namespace flash_cute {

BackwardResult backward_cuda(BackwardArguments const&) { refuse_gpu("q"); }
std::tuple<Tensor, Tensor> bias_gradient_cuda(BackwardArguments const&) { refuse_gpu("q"); }
Tensor weights_cuda(BackwardArguments const&) { refuse_gpu("q"); }
std::string backward_plan_cuda(BackwardArguments const&) { refuse_gpu("q"); }

}  // namespace flash_cute

#endif
