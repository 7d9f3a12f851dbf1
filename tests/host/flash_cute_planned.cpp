// Calls as csrc/kernels/planned_call.cpp plans them, for tests/host/test_planned_call.py. A build has every
// kernel of instances.def, or none of some variant; nothing is launched.
#include "../../csrc/kernels/planned_call.cpp"

#include "bindings/changes.hpp"

namespace {

using namespace flash_cute;
namespace py = pybind11;

std::string without;  // the variant that the build lacks

void run_forward(ForwardParams const&, WindowMask const&, ForwardPlan const&, void*, cudaStream_t) {}
void run_backward(BackwardParams const&, WindowMask const&, BackwardPlan const&, cudaStream_t) {}
void run_pairs(PairParams const&, WindowMask const&, PairPlan const&, void*, cudaStream_t) {}
PairPlan plan_pairs(PairParams const& params) { return PairPlan::make(Family::sm90, params, 4, 0); }

struct Row {
  Pass pass;
  Family family;
  HeadDims head_dims;
  Variant variant;
  std::string elements;  // empty: those of 16 bits
};

std::vector<Row> const& rows() {
  static std::vector<Row> const all{
#define FLASH_CUTE_PAIR(pass, family, head_dim, head_dim_v, variant, ...) \
  {Pass::pass, Family::family, {head_dim, head_dim_v}, Variant::variant, #__VA_ARGS__},
#define FLASH_CUTE_INSTANCE(pass, family, head_dim, variant, ...) \
  FLASH_CUTE_PAIR(pass, family, head_dim, head_dim, variant, __VA_ARGS__)
#include "flash_cute/instances.def"
  };
  return all;
}

// The smallest that holds both head dims, as the dispatcher has it; 0 where there is none.
HeadDims bucket_of(Pass pass, Family family, ElementType element, HeadDims head_dims, Variant variant) {
  HeadDims found{0, 0};
  for (Row const& row : rows()) {
    bool const serves =
        element_bytes(element) == 2 || row.elements.find(name_of(element)) != std::string::npos;
    if (row.pass != pass || row.family != family || row.variant != variant || !serves) continue;
    if (name_of(variant) == without || !row.head_dims.holds(head_dims)) continue;
    if (found.qk == 0 || row.head_dims.qk + row.head_dims.v < found.qk + found.v) found = row.head_dims;
  }
  return found;
}

template <class T>
T given(py::dict const& values, char const* name, T otherwise) {
  return values.contains(name) ? values[name].cast<T>() : otherwise;
}

// sizes: as of ProblemShape. options: what is not by default.
AttentionProblem problem_of(std::array<int, 7> const& sizes, py::dict const& options,
                            py::dict const& changes) {
  AttentionProblem problem{};
  problem.shape = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]};
  auto const element = given<std::string>(options, "element", "bf16");
  for (auto const type : {ElementType::fp16, ElementType::bf16, ElementType::fp32, ElementType::tf32})
    if (element == name_of(type)) problem.element = type;
  problem.softmax_scale = 1;
  problem.window_left = given<std::optional<int64_t>>(options, "left", std::nullopt);
  problem.window_right = given<std::optional<int64_t>>(options, "right", std::nullopt);
  for (auto const family : {Family::sm80, Family::sm90})
    if (given<std::string>(options, "family", "") == name_of(family)) problem.family = family;
  problem.varlen = given(options, "varlen", false);
  problem.batch_invariant = given(options, "batch_invariant", false);
  host::Changes const changed(changes);
  problem.ranges = changed.ranges.count;
  problem.pair_mask = changed.pair_mask;
  problem.scores = changed.scores;
  return problem;
}

// As the GPU reports itself: its compute capability, multiprocessors and KiB of shared memory.
Gpu gpu_of(std::array<int, 3> const& facts) {
  return {{.index = 0, .multiprocessors = facts[1], .smem_bytes = facts[2] << 10, .l2_bytes = 50 << 20},
          facts[0]};
}

}  // namespace

namespace flash_cute {

ForwardEntry forward_kernel(Family family, ElementType element, HeadDims head_dims, Variant variant) {
  HeadDims const bucket = bucket_of(Pass::forward, family, element, head_dims, variant);
  return bucket.qk > 0 ? ForwardEntry{family, bucket, run_forward, nullptr} : ForwardEntry{};
}
BackwardEntry backward_kernel(Family family, ElementType element, HeadDims head_dims, Variant variant) {
  HeadDims const bucket = bucket_of(Pass::backward, family, element, head_dims, variant);
  return bucket.qk > 0 ? BackwardEntry{family, bucket, run_backward, nullptr} : BackwardEntry{};
}
PairEntry pair_kernel(Family family, ElementType) { return {family, plan_pairs, run_pairs}; }

}  // namespace flash_cute

PYBIND11_MODULE(flash_cute_planned, module) {
  module.def("build_without", [](std::string const& variant) { without = variant; });
  module.def("is_general", [](std::array<int, 7> const& sizes, py::dict const& changes) {
    return problem_of(sizes, {}, changes).is_general();
  });
  // The family that takes a call, its head dim, whether keys are cut, heads of a tile, keys that no query
  // reaches, bytes of the workspace.
  module.def("forward", [](std::array<int, 7> const& sizes, py::dict const& options, py::dict const& changes,
                           std::array<int, 3> const& gpu) {
    ForwardCall const call = plan_forward_call(problem_of(sizes, options, changes), {}, gpu_of(gpu));
    return std::tuple(name_of(call.kernel.family), call.kernel.bucket.qk, call.launch.splits(),
                      call.launch.rows.heads.value, call.unreachable(), call.launch.workspace.bytes);
  });
  // Without what only a forward has.
  module.def("backward", [](std::array<int, 7> const& sizes, py::dict const& options, py::dict const& changes,
                            std::array<int, 3> const& gpu, bool deterministic) {
    BackwardCall const call =
        plan_backward_call(problem_of(sizes, options, changes), {}, gpu_of(gpu), true, true, deterministic);
    return std::tuple(name_of(call.kernel.family), call.kernel.bucket.qk, call.unreachable(),
                      call.launch.workspace.bytes);
  });
  // Of the gradient of a bias of this shape: how many blocks of pairs a number of it is added to.
  module.def("bias_gradient", [](std::array<int, 7> const& sizes, std::array<int, 4> const& shape,
                                 std::array<int, 3> const& gpu) {
    AttentionProblem problem{};
    problem.shape = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]};
    problem.element = ElementType::bf16;
    problem.softmax_scale = 1;
    problem.scores.bias.given = true;
    PairShape const of{shape[0], shape[1], shape[2], shape[3]};
    return plan_pair_call(problem, {}, gpu_of(gpu), of).launch.steps;
  });
  module.def("forward_workspace",
             [](std::array<int, 7> const& sizes, py::dict const& options, py::dict const& changes) {
               return forward_workspace(problem_of(sizes, options, changes));
             });
  module.def("backward_workspace", [](std::array<int, 7> const& sizes, py::dict const& options,
                                      py::dict const& changes, bool deterministic) {
    return backward_workspace(problem_of(sizes, options, changes), deterministic);
  });
}
