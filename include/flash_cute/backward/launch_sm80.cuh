// Launches the Ampere family's backward.
#pragma once

#include "flash_cute/backward/kernel_sm80.hpp"
#include "flash_cute/backward/launch.hpp"
#include "flash_cute/backward/postprocess_sm80.hpp"
#include "flash_cute/backward/preprocess.cuh"
#include "flash_cute/backward/query_kernel_sm80.hpp"

namespace flash_cute {

template <class Instance>
void BackwardLaunch<Instance>::run(BackwardParams const& params, BackwardPlan const& plan,
                                   cudaStream_t stream) {
  using WithDq = BackwardTraitsSm80<Instance, true>;
  using WithoutDq = BackwardTraitsSm80<Instance, false>;
  using Query = QueryTraitsSm80<Instance>;
  ProblemShape const& shape = params.shape;
  DeviceInfo const& device = params.device;
  constexpr int kRowThreads = 256;
  int const queries = plan.query_blocks * shape.heads_q, keys = plan.key_blocks * shape.heads_kv;
  launch_kernel<backward_preprocess<Instance, WithDq::kBlockM, kRowThreads>>(device, queries, kRowThreads, 0,
                                                                             stream, params, plan.sums_dq);
  auto launch_keys = [&]<class Traits>(Traits) {
    launch_kernel<backward_kernel_sm80<Traits>>(device, keys, Traits::kThreads,
                                                sizeof(typename Traits::SharedStorage), stream, params);
  };
  if (plan.sums_dq) {
    launch_keys(WithDq{});
    launch_kernel<backward_postprocess_sm80<WithDq>>(device, queries, WithDq::kThreads, 0, stream, params);
  } else if (plan.runs_keys) {
    launch_keys(WithoutDq{});
  }
  if (plan.runs_queries) {
    BlockPlaces const tiles{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, Query::kBlockM};
    launch_kernel<backward_query_kernel_sm80<Query>>(device, tiles.count() * shape.heads_q, Query::kThreads,
                                                     sizeof(typename Query::SharedStorage), stream, params);
  }
}

template <class Instance>
KernelAttributes BackwardLaunch<Instance>::attributes(BackwardPlan const& plan) {
  auto read = [](auto traits, auto* kernel) {
    using Traits = decltype(traits);
    return read_attributes(kernel, Traits::kThreads, sizeof(typename Traits::SharedStorage));
  };
  using WithDq = BackwardTraitsSm80<Instance, true>;
  using WithoutDq = BackwardTraitsSm80<Instance, false>;
  using Query = QueryTraitsSm80<Instance>;
  if (plan.sums_dq) return read(WithDq{}, backward_kernel_sm80<WithDq>);
  if (plan.runs_keys) return read(WithoutDq{}, backward_kernel_sm80<WithoutDq>);
  return read(Query{}, backward_query_kernel_sm80<Query>);
}

}  // namespace flash_cute
