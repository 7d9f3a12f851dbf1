// The operators: one schema each, and which function serves it on which device.
#include <torch/csrc/stable/library.h>

#include "backward.hpp"
#include "forward.hpp"

namespace flash_cute {
namespace {

using MaybeTensor = std::optional<Tensor>;

// These give a function of AttentionArguments the signature of a schema.
template <auto function>
auto padded(Tensor q, Tensor k, Tensor v, bool causal, std::optional<double> softmax_scale,
            std::optional<int64_t> window_left, std::optional<int64_t> window_right, MaybeTensor seqused_q,
            MaybeTensor seqused_k, MaybeTensor leftpad_k, MaybeTensor sinks, MaybeTensor block_table,
            bool batch_invariant, MaybeTensor ranges, std::optional<std::string> family, bool tf32) {
  return function({q,
                   k,
                   v,
                   {causal, softmax_scale, window_left, window_right, family, batch_invariant, tf32},
                   {{}, {}, seqused_q, seqused_k, leftpad_k, block_table},
                   ranges,
                   {},
                   sinks});
}

template <auto function>
auto packed(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, MaybeTensor cu_seqlens_k, bool causal,
            std::optional<double> softmax_scale, std::optional<int64_t> window_left,
            std::optional<int64_t> window_right, MaybeTensor seqused_q, MaybeTensor seqused_k,
            MaybeTensor leftpad_k, MaybeTensor sinks, MaybeTensor block_table, bool batch_invariant,
            MaybeTensor ranges, std::optional<std::string> family, bool tf32) {
  return function({q,
                   k,
                   v,
                   {causal, softmax_scale, window_left, window_right, family, batch_invariant, tf32},
                   {cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, block_table},
                   ranges,
                   {},
                   sinks});
}

// Of padded and packed calls, with a tensor to write out into.
template <auto function>
auto into(Tensor q, Tensor k, Tensor v, Tensor out, bool causal, std::optional<double> softmax_scale,
          std::optional<int64_t> window_left, std::optional<int64_t> window_right, MaybeTensor cu_seqlens_q,
          MaybeTensor cu_seqlens_k, MaybeTensor seqused_q, MaybeTensor seqused_k, MaybeTensor leftpad_k,
          MaybeTensor sinks, MaybeTensor block_table, bool batch_invariant, MaybeTensor ranges,
          std::optional<std::string> family, bool tf32) {
  return function({q,
                   k,
                   v,
                   {causal, softmax_scale, window_left, window_right, family, batch_invariant, tf32},
                   {cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, block_table},
                   ranges,
                   out,
                   sinks});
}

template <auto function>
auto backward_padded(MaybeTensor dout, MaybeTensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
                     bool causal, std::optional<double> softmax_scale, std::optional<int64_t> window_left,
                     std::optional<int64_t> window_right, MaybeTensor seqused_q, MaybeTensor seqused_k,
                     MaybeTensor leftpad_k, MaybeTensor sinks, bool needs_dq, bool needs_dkv,
                     MaybeTensor ranges, bool deterministic, std::optional<std::string> family, bool tf32) {
  AttentionArguments const attention{q,
                                     k,
                                     v,
                                     {causal, softmax_scale, window_left, window_right, family, false, tf32},
                                     {{}, {}, seqused_q, seqused_k, leftpad_k},
                                     ranges,
                                     {},
                                     sinks};
  return function({attention, out, lse, dout, dlse, needs_dq, needs_dkv, deterministic});
}

template <auto function>
auto backward_packed(MaybeTensor dout, MaybeTensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
                     Tensor cu_seqlens_q, MaybeTensor cu_seqlens_k, bool causal,
                     std::optional<double> softmax_scale, std::optional<int64_t> window_left,
                     std::optional<int64_t> window_right, MaybeTensor seqused_q, MaybeTensor seqused_k,
                     MaybeTensor leftpad_k, MaybeTensor sinks, bool needs_dq, bool needs_dkv,
                     MaybeTensor ranges, bool deterministic, std::optional<std::string> family, bool tf32) {
  AttentionArguments const attention{q,
                                     k,
                                     v,
                                     {causal, softmax_scale, window_left, window_right, family, false, tf32},
                                     {cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k},
                                     ranges,
                                     {},
                                     sinks};
  return function({attention, out, lse, dout, dlse, needs_dq, needs_dkv, deterministic});
}

template <auto forward_plan, auto backward_plan>
std::string plan(Tensor q, Tensor k, Tensor v, bool causal, std::optional<double> softmax_scale,
                 std::optional<int64_t> window_left, std::optional<int64_t> window_right,
                 MaybeTensor cu_seqlens_q, MaybeTensor cu_seqlens_k, MaybeTensor seqused_q,
                 MaybeTensor seqused_k, MaybeTensor leftpad_k, MaybeTensor sinks, MaybeTensor block_table,
                 bool batch_invariant, MaybeTensor ranges, bool backward, bool deterministic,
                 std::optional<std::string> family, bool tf32) {
  AttentionArguments const attention{
      q,
      k,
      v,
      {causal, softmax_scale, window_left, window_right, family, batch_invariant, tf32},
      {cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, block_table},
      ranges,
      {},
      sinks};
  if (!backward) return forward_plan(attention);
  return backward_plan({attention, {}, {}, {}, {}, true, true, deterministic});
}

// Returns lse alone, as no result may be an argument.
Tensor lse_of_forward(AttentionArguments const& arguments) { return std::get<1>(forward_cuda(arguments)); }

// What C++ does for the CPU's kernels beside forward_cpu.
void check_forward(AttentionArguments const& arguments) { validate(arguments); }
void check_backward(BackwardArguments const& arguments) { validate(arguments); }

using MaybeSizes = std::optional<std::vector<int64_t>>;

// The checks of a call, of the backward if it has an lse, for tensors of which only this is known; dtypes and
// devices are those of the tensors that are given, in this order, steps the strides of those of lengths.
void check_traced(std::vector<int64_t> q, std::vector<int64_t> k, std::vector<int64_t> v,
                  std::vector<ScalarType> dtypes, std::vector<Device> devices, std::vector<int64_t> steps,
                  bool causal, std::optional<double> softmax_scale, std::optional<int64_t> window_left,
                  std::optional<int64_t> window_right, MaybeSizes cu_seqlens_q, MaybeSizes cu_seqlens_k,
                  MaybeSizes seqused_q, MaybeSizes seqused_k, MaybeSizes leftpad_k, MaybeSizes sinks,
                  MaybeSizes block_table, bool batch_invariant, MaybeSizes ranges, MaybeSizes out,
                  MaybeSizes lse, MaybeSizes dout, MaybeSizes dlse, std::optional<std::string> family,
                  bool tf32) {
  size_t next = 0;
  auto operand = [&](char const* name, std::vector<int64_t> const& sizes) {
    Operand const found{name, sizes, dtypes.at(next), devices.at(next)};
    ++next;
    return found;
  };
  Operand const operand_q = operand("q", q), operand_k = operand("k", k), operand_v = operand("v", v);
  LengthOperands lengths;
  size_t index = 0, given = 0;
  for (MaybeSizes const* sizes :
       {&cu_seqlens_q, &cu_seqlens_k, &seqused_q, &seqused_k, &leftpad_k, &block_table}) {
    if (sizes->has_value()) {
      lengths[index].emplace(operand(kLengthNames[index], **sizes)).step = steps.at(given++);
    }
    ++index;
  }
  std::optional<Operand> operand_ranges;
  if (ranges) operand_ranges.emplace(operand("ranges", *ranges)).step = steps.at(given);
  AttentionProblem const problem =
      validate(operand_q, operand_k, operand_v,
               {causal, softmax_scale, window_left, window_right, family, batch_invariant, tf32}, lengths,
               operand_ranges);
  if (sinks) validate_sinks(operand_q, operand("sinks", *sinks));
  if (!out) return;
  if (!lse) return validate_out(operand_q, operand("out", *out));
  validate_keys_of_backward(problem);
  BackwardOperands operands;
  index = 0;
  for (MaybeSizes const* sizes : {&out, &lse, &dout, &dlse}) {
    if (sizes->has_value()) operands[index].emplace(operand(kBackwardNames[index], **sizes));
    ++index;
  }
  validate_backward(operand_q, problem.packed, operands);
}

}  // namespace
}  // namespace flash_cute

#define FLASH_CUTE_TENSORS "Tensor q, Tensor k, Tensor v, "
#define FLASH_CUTE_GRADIENTS "Tensor? dout, Tensor? dlse, " FLASH_CUTE_TENSORS "Tensor out, Tensor lse, "
#define FLASH_CUTE_OFFSETS "Tensor cu_seqlens_q, Tensor? cu_seqlens_k=None, "
#define FLASH_CUTE_OPTIONS                                                              \
  "bool causal=False, *, float? softmax_scale=None, SymInt? window_left=None, SymInt? " \
  "window_right=None, "
#define FLASH_CUTE_LENGTHS(type) \
  type "? seqused_q=None, " type "? seqused_k=None, " type "? leftpad_k=None, " type "? sinks=None, "
#define FLASH_CUTE_RANGES(type) type "? ranges=None, "
// What only a forward has.
#define FLASH_CUTE_CACHE(type) type "? block_table=None, bool batch_invariant=False, " FLASH_CUTE_RANGES(type)
#define FLASH_CUTE_MAYBE_OFFSETS(type) type "? cu_seqlens_q=None, " type "? cu_seqlens_k=None, "
#define FLASH_CUTE_MAYBE_RESULTS(type) \
  type "? out=None, " type "? lse=None, " type "? dout=None, " type "? dlse=None, "
#define FLASH_CUTE_DETERMINISTIC "bool deterministic=False, "
#define FLASH_CUTE_FAMILY "str? family=None, bool tf32=False) "
#define FLASH_CUTE_RESULTS FLASH_CUTE_FAMILY "-> (Tensor out, Tensor lse)"
#define FLASH_CUTE_PADDED \
  FLASH_CUTE_TENSORS FLASH_CUTE_OPTIONS FLASH_CUTE_LENGTHS("Tensor") FLASH_CUTE_CACHE("Tensor")
#define FLASH_CUTE_PACKED                                                               \
  FLASH_CUTE_TENSORS FLASH_CUTE_OFFSETS FLASH_CUTE_OPTIONS FLASH_CUTE_LENGTHS("Tensor") \
      FLASH_CUTE_CACHE("Tensor")
#define FLASH_CUTE_INTO(out)                                                                                \
  FLASH_CUTE_TENSORS out FLASH_CUTE_OPTIONS FLASH_CUTE_MAYBE_OFFSETS("Tensor") FLASH_CUTE_LENGTHS("Tensor") \
      FLASH_CUTE_CACHE("Tensor") FLASH_CUTE_FAMILY
#define FLASH_CUTE_BACKWARD                                                             \
  FLASH_CUTE_OPTIONS FLASH_CUTE_LENGTHS(                                                \
      "Tensor") "bool needs_dq=True, bool needs_dkv=True, " FLASH_CUTE_RANGES("Tensor") \
      FLASH_CUTE_DETERMINISTIC FLASH_CUTE_FAMILY
#define FLASH_CUTE_INPUT_GRADIENTS "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"

// forward and forward_varlen are what Python calls and differentiates (flash_cute/ops.py); those with an
// underscore are what they run, and what is left of them in compiled and exported graphs.
STABLE_TORCH_LIBRARY(flash_cute, library) {
  library.def("forward(" FLASH_CUTE_PADDED FLASH_CUTE_DETERMINISTIC FLASH_CUTE_RESULTS);
  library.def("_forward(" FLASH_CUTE_PADDED FLASH_CUTE_RESULTS);
  library.def("_forward_out(" FLASH_CUTE_INTO("Tensor(a!) out, ") "-> Tensor");
  library.def("_backward(" FLASH_CUTE_GRADIENTS FLASH_CUTE_BACKWARD FLASH_CUTE_INPUT_GRADIENTS);
  library.def("forward_varlen(" FLASH_CUTE_PACKED FLASH_CUTE_DETERMINISTIC FLASH_CUTE_RESULTS);
  library.def("_forward_varlen(" FLASH_CUTE_PACKED FLASH_CUTE_RESULTS);
  library.def("_backward_varlen(" FLASH_CUTE_GRADIENTS FLASH_CUTE_OFFSETS FLASH_CUTE_BACKWARD
                  FLASH_CUTE_INPUT_GRADIENTS);
  library.def("plan(" FLASH_CUTE_TENSORS FLASH_CUTE_OPTIONS FLASH_CUTE_MAYBE_OFFSETS("Tensor")
                  FLASH_CUTE_LENGTHS("Tensor") FLASH_CUTE_CACHE(
                      "Tensor") "bool backward=False, " FLASH_CUTE_DETERMINISTIC FLASH_CUTE_FAMILY "-> str");
  library.def("compiled() -> str");
  library.def(
      "_check(int[] q, int[] k, int[] v, ScalarType[] dtypes, Device[] devices, int[] "
      "steps, " FLASH_CUTE_OPTIONS FLASH_CUTE_MAYBE_OFFSETS("int[]") FLASH_CUTE_LENGTHS("int[]")
          FLASH_CUTE_CACHE("int[]") FLASH_CUTE_MAYBE_RESULTS("int[]") FLASH_CUTE_FAMILY "-> ()");
  library.def("_forward_cpu(" FLASH_CUTE_PADDED FLASH_CUTE_FAMILY "-> Tensor[]");
  library.def("_forward_varlen_cpu(" FLASH_CUTE_PACKED FLASH_CUTE_FAMILY "-> ()");
  library.def("_forward_out_cpu(" FLASH_CUTE_INTO("Tensor out, ") "-> ()");
  library.def("_backward_cpu(" FLASH_CUTE_GRADIENTS FLASH_CUTE_BACKWARD "-> ()");
  library.def("_backward_varlen_cpu(" FLASH_CUTE_GRADIENTS FLASH_CUTE_OFFSETS FLASH_CUTE_BACKWARD "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, library) {
  library.impl("_forward", TORCH_BOX(&flash_cute::padded<flash_cute::forward_cuda>));
  library.impl("_forward_varlen", TORCH_BOX(&flash_cute::packed<flash_cute::forward_cuda>));
  library.impl("_forward_out", TORCH_BOX(&flash_cute::into<flash_cute::lse_of_forward>));
  library.impl("_backward", TORCH_BOX(&flash_cute::backward_padded<flash_cute::backward_cuda>));
  library.impl("_backward_varlen", TORCH_BOX(&flash_cute::backward_packed<flash_cute::backward_cuda>));
  library.impl("plan", TORCH_BOX((&flash_cute::plan<flash_cute::plan_cuda, flash_cute::backward_plan_cuda>)));
}

// Those of _forward and the others are Python's (flash_cute/cpu.py), which calls these: what is raised in
// Python, a KeyboardInterrupt too, would not pass through C++ behind the stable ABI.
STABLE_TORCH_LIBRARY_IMPL(flash_cute, CPU, library) {
  library.impl("_forward_cpu", TORCH_BOX(&flash_cute::padded<flash_cute::forward_cpu>));
  library.impl("_forward_varlen_cpu", TORCH_BOX(&flash_cute::packed<flash_cute::check_forward>));
  library.impl("_forward_out_cpu", TORCH_BOX(&flash_cute::into<flash_cute::check_forward>));
  library.impl("_backward_cpu", TORCH_BOX(&flash_cute::backward_padded<flash_cute::check_backward>));
  library.impl("_backward_varlen_cpu", TORCH_BOX(&flash_cute::backward_packed<flash_cute::check_backward>));
  library.impl("plan", TORCH_BOX((&flash_cute::plan<flash_cute::plan_cpu, flash_cute::backward_plan_cpu>)));
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, library) {
  library.impl("compiled", TORCH_BOX(&flash_cute::compiled_kernels));
  library.impl("_check", TORCH_BOX(&flash_cute::check_traced));
}
