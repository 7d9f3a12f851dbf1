#include "../planned_call.hpp"

#include <cmath>

#include "flash_cute/forward/tile_source.hpp"

namespace flash_cute {
namespace {

constexpr char kBuildAll[] =
    "; flash_cute.supported() lists what it has, FLASH_CUTE_FAMILIES=all pip install . builds what there is";

// What a GPU of Ampere or newer lets a thread block have of shared memory: 8.6 and 8.9, 8.0, 9.0.
constexpr int kSharedMemories[] = {99 << 10, 163 << 10, 227 << 10};

// Returns the family that the problem asks for, else the best one that this build has for the GPU, and throws
// where the GPU cannot run it. find: forward_kernel or backward_kernel.
template <class Find>
Family family_for(AttentionProblem const& problem, Gpu const& gpu, Find&& find) {
  constexpr int kAmpere = 80, kHopper = 90;
  int const capability = gpu.compute_capability;
  require(capability >= kAmpere, "the GPU has compute capability ", capability / 10, ".", capability % 10,
          "; 8.0 (Ampere) and newer are supported");
  if (!problem.family) {
    bool const has_sm90 = find(Family::sm90, problem.element, problem.shape.head_dims()).run;
    return capability == kHopper && has_sm90 ? Family::sm90 : Family::sm80;
  }
  require(*problem.family != Family::sm90 || capability == kHopper,
          "family is 'sm90', which needs compute capability ", "9.0 (Hopper), but the GPU has ",
          capability / 10, ".", capability % 10);
  return *problem.family;
}

// Functions that find the kernel of a variant.
auto forward_of(Variant variant) {
  return [=](Family family, ElementType element, HeadDims head_dims) {
    return forward_kernel(family, element, head_dims, variant);
  };
}
// The order in which Hopper's kernels add to dQ where calls are deterministic is a window's: of general calls
// sm80's, which need none, take their place.
auto backward_of(Variant variant, bool deterministic = false) {
  return [=](Family family, ElementType element, HeadDims head_dims) {
    if (variant == Variant::general && deterministic) family = Family::sm80;
    return backward_kernel(family, element, head_dims, variant);
  };
}
Variant variant_of(AttentionProblem const& problem) {
  return problem.is_general() ? Variant::general : Variant::plain;
}
std::string described(ProblemShape const& shape) {
  std::string const text = "head_dim " + std::to_string(shape.head_dim);
  return shape.head_dim_v == shape.head_dim ? text
                                            : text + " (of v " + std::to_string(shape.head_dim_v) + ')';
}
// The kernel that cuts keys into parts, if there is one.
ForwardEntry split_entry(AttentionProblem const& problem, Family family) {
  Variant const variant = problem.is_general() ? Variant::general : Variant::split;
  auto const kernel = forward_kernel(family, problem.element, problem.shape.head_dims(), variant);
  auto const tiles = forward_tiles(family, kernel.bucket, element_bytes(problem.element));
  return tiles.decode.warps > 0 ? kernel : ForwardEntry{};
}
// General kernels ask a sequence for its lengths, whether they were given or not.
bool has_lengths(AttentionProblem const& problem) { return problem.varlen || problem.is_general(); }

// What an error says a kernel lacks.
char const* described(AttentionProblem const& problem, Variant variant) {
  return variant != Variant::general ? "" : problem.ranges > 0 ? "ranges with " : "changed scores with ";
}

template <class Find>
auto kernel_for(Pass pass, AttentionProblem const& problem, Gpu const& gpu, Find&& find) {
  Family const family = family_for(problem, gpu, find);
  auto const kernel = find(family, problem.element, problem.shape.head_dims());
  require(kernel.run, "this build has no ", name_of(family), ' ', name_of(pass), " kernel for ",
          described(problem, variant_of(problem)), name_of(problem.element), " and ",
          described(problem.shape), kBuildAll);
  return kernel;
}

// The mask as kernels see it: keys that no query can reach are cut off, and it stays aligned to the end of
// the keys. Of sequences of unequal lengths the kernels see to it.
WindowMask reachable_mask(AttentionProblem const& problem) {
  WindowMask mask = problem.mask();
  if (!has_lengths(problem) && !problem.batch_invariant) mask.seqlen_k -= mask.first_reachable_key();
  return mask;
}

// What both passes know of a call beside its operands and its mask.
template <class Params>
Params make_params(AttentionProblem const& problem, LengthParams const& lengths, DeviceInfo const& device) {
  Params params{};
  params.shape = problem.shape;
  params.element_bytes = element_bytes(problem.element);
  for (int* width : {&params.shape.head_dim, &params.shape.head_dim_v})
    *width = padded_head_dim(*width, params.element_bytes);
  params.device = device;
  params.lse_batch_stride = problem.packed ? 0 : int64_t(problem.shape.heads_q) * problem.shape.seqlen_q;
  params.ranges = problem.ranges_params();
  params.pair_mask = problem.pair_mask;
  if (problem.varlen) params.pair_mask.entries = problem.shape.batch;  // by each sequence's own keys
  params.scores = problem.scores.derive();
  if (has_lengths(problem)) {
    params.lengths = lengths;
    params.lengths.given = true;
  } else {
    params.shape.seqlen_k = reachable_mask(problem).seqlen_k;
  }
  return params;
}

PairEntry find_pair_kernel(Family family, ElementType element, HeadDims) {
  return pair_kernel(family, element);
}

// The kernel asks a sequence for its lengths, whatever the call is. params: of make_params.
PairParams pair_params(AttentionProblem const& problem, BackwardParams params, LengthParams const& lengths,
                       PairShape const& shape) {
  params.shape.seqlen_k = problem.shape.seqlen_k;
  params.lengths = lengths;
  params.lengths.given = true;
  params.softmax_scale = problem.softmax_scale;
  return {.call = params, .shape = shape};
}

bool is_empty(ProblemShape const& shape) {
  return shape.seqlen_k == 0 || shape.seqlen_q == 0 || shape.heads_q == 0 || shape.batch == 0;
}

// The largest result of bytes(its kernel, params, mask) over all GPUs.
template <class Params, class Find, class Bytes>
int64_t largest(AttentionProblem const& problem, Find&& find, Bytes&& bytes) {
  int64_t most = 0;
  for (Family const family : {Family::sm80, Family::sm90}) {
    auto const kernel = find(family, problem.element, problem.shape.head_dims());
    if (!kernel.run) continue;
    for (int const smem_bytes : kSharedMemories) {
      // Each number that a GPU may have: with more, groups are split into more parts, or into fewer.
      int const largest_gpu = traits_of(family).most_multiprocessors;
      for (int multiprocessors = 1; multiprocessors <= largest_gpu; ++multiprocessors) {
        DeviceInfo const device{
            .index = 0, .multiprocessors = multiprocessors, .smem_bytes = smem_bytes, .l2_bytes = 1};
        most = larger(most, bytes(kernel, make_params<Params>(problem, {}, device), reachable_mask(problem)));
      }
    }
  }
  return most;
}

}  // namespace

ForwardCall plan_forward_call(AttentionProblem const& problem, LengthParams const& lengths, Gpu const& gpu,
                              int const* block_table, int64_t table_stride) {
  ForwardCall call{problem,
                   kernel_for(Pass::forward, problem, gpu, forward_of(variant_of(problem))),
                   make_params<ForwardParams>(problem, lengths, gpu.info),
                   reachable_mask(problem),
                   true,
                   {}};
  call.params.softmax = {(problem.scores.change() ? call.params.scores.unit : problem.softmax_scale) *
                         float(M_LOG2E)};
  call.params.batch_invariant = problem.batch_invariant;
  call.params.cache = {.given = problem.cached,
                       .table = block_table,
                       .table_stride = table_stride,
                       .table_width = problem.page_size > 0 ? problem.shape.seqlen_k / problem.page_size : 0,
                       .pages = problem.pages,
                       .page_size = problem.page_size,
                       .is_fp8 = problem.is_fp8};
  ForwardParams planned = call.params;
  WindowMask mask = call.mask;
  if (is_empty(planned.shape)) {
    call.launches = false;
    planned.shape = {1, 1, 1, 1, 1, planned.shape.head_dim, planned.shape.head_dim_v};
    mask = WindowMask::make(1, 1, 0, 0);
    planned.lengths = {};
    planned.cache = {};
  }
  ForwardEntry const split = split_entry(problem, call.kernel.family);
  require(!problem.is_fp8 || call.kernel.family == Family::sm90,
          "k must have the dtype of q with the kernels of the Ampere family, got one of 8 bits");
  require(split.run || !(problem.cached || problem.batch_invariant), "this build has no ",
          name_of(call.kernel.family), " kernel for caches and batch_invariant with ",
          name_of(problem.element), " and ", described(problem.shape), kBuildAll);
  call.launch = plan_forward(call.kernel.family, call.kernel.bucket, split.bucket, planned, mask);
  if (call.launch.splits()) call.kernel = split;
  return call;
}

BackwardCall plan_backward_call(AttentionProblem const& problem, LengthParams const& lengths, Gpu const& gpu,
                                bool needs_dq, bool needs_dkv, bool deterministic) {
  require(!deterministic || !problem.is_general() || problem.family != Family::sm90,
          "family must be 'sm80' or None where gradients with ranges or changed scores are deterministic, "
          "got 'sm90'");
  BackwardCall call{problem,
                    kernel_for(Pass::backward, problem, gpu, backward_of(variant_of(problem), deterministic)),
                    make_params<BackwardParams>(problem, lengths, gpu.info),
                    reachable_mask(problem),
                    true,
                    {}};
  call.params.softmax_scale = problem.softmax_scale;
  call.launches = !is_empty(call.params.shape);
  call.launch = plan_backward(call.kernel.family, call.kernel.bucket, call.params, call.mask, needs_dq,
                              needs_dkv, deterministic);
  int const smem_bytes = call.launch.kernel.tile.smem_bytes(call.kernel.bucket.qk, call.params.element_bytes);
  require(call.kernel.family != Family::sm80 || smem_bytes <= gpu.info.smem_bytes, "the backward of ",
          name_of(problem.element), " with ", described(problem.shape), " needs ", smem_bytes,
          " bytes of shared memory for a thread block, but the GPU has ", gpu.info.smem_bytes);
  call.launch.part_groups(call.params);
  return call;
}

PairCall plan_pair_call(AttentionProblem const& problem, LengthParams const& lengths, Gpu const& gpu,
                        PairShape const& shape) {
  Family const family = family_for(problem, gpu, find_pair_kernel);
  PairCall call{pair_kernel(family, problem.element), {}, problem.mask(), false, {}};
  require(call.kernel.run, "this build has no ", name_of(family), " kernel for values of pairs with ",
          name_of(problem.element), kBuildAll);
  call.params = pair_params(problem, make_params<BackwardParams>(problem, lengths, gpu.info), lengths, shape);
  call.launches = !is_empty(problem.shape) && shape.count() > 0;
  if (!call.launches) return call;
  call.launch = call.kernel.plan(call.params);
  require(call.launch.tiles(shape) <= PairPlan::kMaxTiles, "values of pairs make ", call.launch.tiles(shape),
          " tiles; at most ", PairPlan::kMaxTiles, " are accepted");
  require(call.launch.steps <= PairPlan::kMaxTiles, "a number of bias is added to ", call.launch.steps,
          " blocks of pairs; at most ", PairPlan::kMaxTiles, " are accepted");
  return call;
}

// By any tile and packing that there is: which one is taken depends on the GPU and the mask.
int64_t forward_workspace(AttentionProblem const& problem) {
  return largest<ForwardParams>(
      problem, forward_of(variant_of(problem)),
      [&](ForwardEntry const& kernel, auto const& params, auto const& mask) {
        Family const family = kernel.family;
        auto bytes = [&](ForwardTiles const& tiles) {
          ForwardPlan plan = plan::plan_whole(family, tiles, params, mask);
          bool const may_be_prepared = plan.kernel.seqlens == Seqlens::varlen;  // of more sequences
          if (may_be_prepared && !plan.prepared_by_kernel)
            plan::add_list<SequenceRecord>(plan, m_block_capacity(params, plan.rows));
          return plan.workspace.bytes;
        };
        ForwardTiles const tiles = forward_tiles(family, kernel.bucket, params.element_bytes);
        int64_t most = sizeof(int);
        for (ForwardTile const& tile : {tiles.main, tiles.small}) {
          if (tile.warps > 0) most = larger(most, bytes({.main = tile}));
        }
        HeadDims const split_bucket = split_entry(problem, family).bucket;
        ForwardTiles const split_tiles = forward_tiles(family, split_bucket, params.element_bytes);
        if (plan::splits(family, split_tiles, params, mask)) {
          most =
              larger(most, plan::plan_split(family, split_tiles, split_bucket, params, mask).workspace.bytes);
        }
        return most;
      });
}

int64_t backward_workspace(AttentionProblem const& problem, bool deterministic) {
  auto const find = backward_of(variant_of(problem), deterministic);
  return largest<BackwardParams>(
      problem, find, [&](BackwardEntry const& kernel, auto const& params, auto const& mask) {
        return plan_backward(kernel.family, kernel.bucket, params, mask, true, true, deterministic)
            .workspace.bytes;
      });
}

int64_t pair_workspace(AttentionProblem const& problem, PairShape const& shape) {
  if (is_empty(problem.shape) || shape.count() == 0) return 0;
  return largest<BackwardParams>(
      problem, find_pair_kernel, [&](PairEntry const& kernel, auto const& params, auto const&) {
        return kernel.plan(pair_params(problem, params, {}, shape)).workspace.bytes;
      });
}

}  // namespace flash_cute
