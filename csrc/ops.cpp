// The operators: one schema each, and which function serves it on which device.
#include <torch/csrc/stable/library.h>

#include <exception>
#include <utility>

#include "backward.hpp"
#include "forward.hpp"

namespace flash_cute {
namespace {

using Sizes = std::vector<int64_t>;
using MaybeSizes = std::optional<Sizes>;

// In place of a tensor that is not read yet: what a move leaves behind, as Tensor() allocates.
Tensor const kUnread = [] {
  Tensor tensor, moved(std::move(tensor));
  return tensor;
}();

// All that an operator may be called with.
struct Call : BackwardArguments {
  bool backward = false;  // the pass of which a plan is asked for

  Call()
      : BackwardArguments{
            {kUnread, kUnread, kUnread, {}}, kUnread, kUnread, {}, {}, true, true, false, false} {}
  operator AttentionArguments const&() const { return attention; }
};

// A call that is traced: sizes in place of tensors. dtypes and devices are those of the tensors that are
// given, in the order of check_traced, steps the strides of those of lengths.
struct TracedCall {
  struct {
    Sizes q, k, v;
    AttentionOptions options;
    std::array<MaybeSizes, std::tuple_size_v<LengthOperands>> lengths;  // kLengthNames
    MaybeSizes ranges, sinks, mask, bias, alibi_slopes, dropout_seed, k_scale, v_scale;
  } attention = {};
  std::vector<ScalarType> dtypes;
  std::vector<Device> devices;
  Sizes steps;
  std::array<MaybeSizes, std::tuple_size_v<BackwardOperands>> results;  // kBackwardNames
};

// Kinds of operators, and the offsets that each takes: none, those of q at least, or what is given.
enum Kind {
  kForward,
  kPublicForward,
  kForwardInto,
  kCheckInto,
  kBackward,
  kBiasGradient,
  kWeights,
  kPlan,
  kTraced
};
enum Offsets { kPadded, kPacked, kEither };
// Is a forward's result, and its gradient, among the arguments?
constexpr bool has_results(Kind kind) { return kind == kBackward || kind == kBiasGradient; }

template <Kind kind>
using CallOf = std::conditional_t<kind == kTraced, TracedCall, Call>;

// The arguments of every operator, in the order of its schema: next(their text there, where they go...).
template <Kind kind, Offsets offsets>
void visit_arguments(auto& next, CallOf<kind>& call) {
  auto& of = call.attention;
  auto& [cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, block_table] = of.lengths;
  AttentionOptions& options = of.options;
  if constexpr (has_results(kind)) next("Tensor? dout, Tensor? dlse, ", call.dout, call.dlse);
  next("Tensor q, Tensor k, Tensor v, ", of.q, of.k, of.v);
  if constexpr (has_results(kind)) next("Tensor out, Tensor lse, ", call.out, call.lse);
  if constexpr (kind == kWeights) next("Tensor lse, ", call.lse);
  if constexpr (kind == kForwardInto) next("Tensor(a!) out, ", of.out.emplace(kUnread));
  if constexpr (kind == kCheckInto) next("Tensor out, ", of.out.emplace(kUnread));
  if constexpr (kind == kTraced) {
    next("ScalarType[] dtypes, Device[] devices, int[] steps, ", call.dtypes, call.devices, call.steps);
  }
  if constexpr (offsets == kPacked) {
    next("Tensor cu_seqlens_q, Tensor? cu_seqlens_k=None, ", cu_seqlens_q.emplace(kUnread), cu_seqlens_k);
  }
  next("bool causal=False, *, float? softmax_scale=None, ", options.causal, options.softmax_scale);
  next("SymInt? window_left=None, SymInt? window_right=None, ", options.window_left, options.window_right);
  if constexpr (offsets == kEither) {
    next("Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, ", cu_seqlens_q, cu_seqlens_k);
  }
  next("Tensor? seqused_q=None, Tensor? seqused_k=None, ", seqused_q, seqused_k);
  next("Tensor? leftpad_k=None, Tensor? sinks=None, ", leftpad_k, of.sinks);
  if constexpr (kind == kBackward) {
    next("bool needs_dq=True, bool needs_dkv=True, ", call.needs_dq, call.needs_dkv);
  } else if constexpr (kind == kBiasGradient) {
    next("bool needs_dv=False, ", call.needs_dv);
  } else if constexpr (kind != kWeights) {
    next("Tensor? block_table=None, bool batch_invariant=False, ", block_table, options.batch_invariant);
    next("Tensor? k_scale=None, Tensor? v_scale=None, ", of.k_scale, of.v_scale);
  }
  next("Tensor? ranges=None, Tensor? mask=None, Tensor? bias=None, ", of.ranges, of.mask, of.bias);
  next("Tensor? alibi_slopes=None, Tensor? dropout_seed=None, ", of.alibi_slopes, of.dropout_seed);
  next("float softcap=0.0, float bias_scale=1.0, ", options.softcap, options.bias_scale);
  next("float dropout_p=0.0, ", options.dropout_p);
  if constexpr (kind == kPlan) next("bool backward=False, ", call.backward);
  if constexpr (kind == kPublicForward || kind == kBackward || kind == kPlan) {
    next("bool deterministic=False, ", call.deterministic);
  }
  if constexpr (kind == kTraced) {
    auto& [out, lse, dout, dlse] = call.results;
    next("Tensor? out=None, Tensor? lse=None, Tensor? dout=None, Tensor? dlse=None, ", out, lse, dout, dlse);
  }
  next("str? family=None, bool tf32=False", options.family, options.tf32);
}

template <Kind kind, Offsets offsets>
void define(torch::stable::detail::StableLibrary& library, char const* name, char const* results) {
  std::string schema = name + std::string("(");
  CallOf<kind> call;
  auto write = [&](char const* text, auto&...) { schema += text; };
  visit_arguments<kind, offsets>(write, call);
  // The list has tensors where a traced call has their sizes.
  for (size_t at; kind == kTraced && (at = schema.find("Tensor")) != schema.npos;) {
    schema.replace(at, 6, "int[]");
  }
  library.def((schema + ") -> " + results).c_str());
}

// What TORCH_BOX does, for a function of a call. Exceptions pass to the dispatcher, as from there.
template <Kind kind, Offsets offsets, auto function>
void boxed(StableIValue* stack, uint64_t count, uint64_t) {
  CallOf<kind> call;
  StableIValue const *next = stack, *const end = stack + count;
  std::exception_ptr error;
  auto take = [&](auto& value) {
    try {
      STD_TORCH_CHECK(next != end, "the schema has fewer arguments");
      value = torch::stable::detail::to<std::remove_reference_t<decltype(value)>>(*next++);
    } catch (...) {  // thrown once the others are taken, as each owns its memory
      error = std::current_exception();
    }
  };
  auto read = [&](char const*, auto&... values) { (take(values), ...); };
  visit_arguments<kind, offsets>(read, call);
  if (error) std::rethrow_exception(error);
  STD_TORCH_CHECK(next == end, "the schema has more arguments");
  if constexpr (std::is_void_v<decltype(function(call))>) {
    function(call);
  } else {
    // A tuple of results stays one.
    std::apply([&](auto const&... results) { ((*stack++ = torch::stable::detail::from(results)), ...); },
               std::tuple(function(call)));
  }
}

template <auto forward_plan, auto backward_plan>
std::string plan(Call const& call) {
  return call.backward ? backward_plan(call) : forward_plan(call);
}

// Returns lse alone, as no result may be an argument.
Tensor lse_of_forward(AttentionArguments const& arguments) { return std::get<1>(forward_cuda(arguments)); }

// What C++ does for the CPU's kernels beside forward_cpu.
void check_forward(AttentionArguments const& arguments) { validate(arguments); }
void check_backward(BackwardArguments const& arguments) { validate(arguments); }
void check_bias_gradient(BackwardArguments const& arguments) { validate_bias_gradient(arguments); }
void check_weights(BackwardArguments const& arguments) { validate_weights(arguments); }

// The checks of a call, of the backward if it has out and lse, of weights if it has an lse alone.
void check_traced(TracedCall const& call) {
  auto const& [q_sizes, k_sizes, v_sizes, options, lengths_sizes, ranges_sizes, sinks_sizes, mask, bias,
               alibi_slopes, dropout_seed, k_scale, v_scale] = call.attention;
  size_t next = 0, next_step = 0;
  auto operand = [&](char const* name, Sizes const& sizes) {
    Operand const found{name, sizes, call.dtypes.at(next), call.devices.at(next)};
    ++next;
    return found;
  };
  auto length = [&](char const* name, MaybeSizes const& sizes) {
    std::optional<Operand> found;
    if (sizes) found.emplace(operand(name, *sizes)).step = call.steps.at(next_step++);
    return found;
  };
  Operand const q = operand("q", q_sizes), k = operand("k", k_sizes), v = operand("v", v_sizes);
  LengthOperands lengths;
  for (size_t i = 0; i < lengths.size(); ++i) lengths[i] = length(kLengthNames[i], lengths_sizes[i]);
  auto const ranges = length("ranges", ranges_sizes);
  std::optional<Operand> sinks;
  if (sinks_sizes) sinks.emplace(operand("sinks", *sinks_sizes));
  ScoreOperands scores;
  MaybeSizes const* const scores_sizes[] = {&mask, &bias, &alibi_slopes, &dropout_seed};
  for (size_t i = 0; i < scores.size(); ++i) {
    if (*scores_sizes[i]) scores[i].emplace(operand(kScoreNames[i], **scores_sizes[i]));
  }
  ScaleOperands scales;
  MaybeSizes const* const scales_sizes[] = {&k_scale, &v_scale};
  for (size_t i = 0; i < scales.size(); ++i) {
    if (*scales_sizes[i]) scales[i].emplace(operand(kScaleNames[i], **scales_sizes[i]));
  }
  AttentionProblem const problem = validate(q, k, v, options, lengths, ranges, scores, scales);
  if (sinks) validate_sinks(q, *sinks);
  BackwardOperands results;
  for (size_t i = 0; i < results.size(); ++i) {
    if (call.results[i]) results[i].emplace(operand(kBackwardNames[i], *call.results[i]));
  }
  auto const& [out, lse, dout, dlse] = results;
  if (!out && !lse) return;
  if (!lse) return validate_out(q, v, *out);
  validate_keys_of_backward(problem);
  if (!out) return validate_results(q, v, problem.packed, results);
  validate_backward(q, v, problem.packed, results);
}

}  // namespace

// forward and forward_varlen are what Python calls and differentiates (flash_cute/_torch/ops.py); those with
// an underscore are what they run, and what is left of them in compiled and exported graphs.
STABLE_TORCH_LIBRARY(flash_cute, library) {
  char const* const results = "(Tensor out, Tensor lse)";
  char const* const gradients = "(Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)";
  define<kPublicForward, kPadded>(library, "forward", results);
  define<kForward, kPadded>(library, "_forward", results);
  define<kForwardInto, kEither>(library, "_forward_out", "Tensor");
  define<kBackward, kPadded>(library, "_backward", gradients);
  define<kBiasGradient, kPadded>(library, "_bias_gradient", "(Tensor dbias, Tensor dv)");
  define<kWeights, kPadded>(library, "_weights", "Tensor");
  define<kPublicForward, kPacked>(library, "forward_varlen", results);
  define<kForward, kPacked>(library, "_forward_varlen", results);
  define<kBackward, kPacked>(library, "_backward_varlen", gradients);
  define<kPlan, kEither>(library, "plan", "str");
  library.def("compiled() -> str");
  define<kTraced, kEither>(library, "_check", "()");
  define<kForward, kPadded>(library, "_forward_cpu", "Tensor[]");
  define<kForward, kPacked>(library, "_forward_varlen_cpu", "()");
  define<kCheckInto, kEither>(library, "_forward_out_cpu", "()");
  define<kBackward, kPadded>(library, "_backward_cpu", "()");
  define<kBiasGradient, kPadded>(library, "_bias_gradient_cpu", "()");
  define<kWeights, kPadded>(library, "_weights_cpu", "()");
  define<kBackward, kPacked>(library, "_backward_varlen_cpu", "()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, library) {
  library.impl("_forward", boxed<kForward, kPadded, forward_cuda>);
  library.impl("_forward_varlen", boxed<kForward, kPacked, forward_cuda>);
  library.impl("_forward_out", boxed<kForwardInto, kEither, lse_of_forward>);
  library.impl("_backward", boxed<kBackward, kPadded, backward_cuda>);
  library.impl("_bias_gradient", boxed<kBiasGradient, kPadded, bias_gradient_cuda>);
  library.impl("_weights", boxed<kWeights, kPadded, weights_cuda>);
  library.impl("_backward_varlen", boxed<kBackward, kPacked, backward_cuda>);
  library.impl("plan", boxed<kPlan, kEither, plan<plan_cuda, backward_plan_cuda>>);
}

// Those of _forward and the others are Python's (flash_cute/_cpu), which calls these: what is raised in
// Python, a KeyboardInterrupt too, would not pass through C++ behind the stable ABI.
STABLE_TORCH_LIBRARY_IMPL(flash_cute, CPU, library) {
  library.impl("_forward_cpu", boxed<kForward, kPadded, forward_cpu>);
  library.impl("_forward_varlen_cpu", boxed<kForward, kPacked, check_forward>);
  library.impl("_forward_out_cpu", boxed<kCheckInto, kEither, check_forward>);
  library.impl("_backward_cpu", boxed<kBackward, kPadded, check_backward>);
  library.impl("_bias_gradient_cpu", boxed<kBiasGradient, kPadded, check_bias_gradient>);
  library.impl("_weights_cpu", boxed<kWeights, kPadded, check_weights>);
  library.impl("_backward_varlen_cpu", boxed<kBackward, kPacked, check_backward>);
  library.impl("plan", boxed<kPlan, kEither, plan<plan_cpu, backward_plan_cpu>>);
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, library) {
  library.impl("compiled", TORCH_BOX(&compiled_kernels));
  library.impl("_check", boxed<kTraced, kEither, check_traced>);
}

}  // namespace flash_cute
