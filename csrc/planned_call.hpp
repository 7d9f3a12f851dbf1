// A call with everything decided but where its operands lie: the family, its kernel, the plan, the workspace.
// Every face makes one, sets pointers and strides, and runs it.
#pragma once

#include "kernels.hpp"
#include "problem.hpp"

namespace flash_cute {

// shape.seqlen_k of params may be less than the problem's: the first keys, which no query reaches, are not
// there for a kernel.
struct ForwardCall {
  AttentionProblem problem;
  ForwardEntry kernel;
  ForwardParams params;
  WindowMask mask;
  bool launches;       // else there is no query or nothing to attend to
  ForwardPlan launch;  // of the smallest problem where nothing is launched

  int unreachable() const { return problem.shape.seqlen_k - params.shape.seqlen_k; }
  // With operands. workspace: of launch.workspace.bytes.
  void run(void* workspace, cudaStream_t stream) const {
    kernel.run(params, mask, launch, workspace, stream);
  }
};

struct BackwardCall {
  AttentionProblem problem;
  BackwardEntry kernel;
  BackwardParams params;
  WindowMask mask;
  bool launches;  // else all gradients are 0
  BackwardPlan launch;

  int unreachable() const { return problem.shape.seqlen_k - params.shape.seqlen_k; }
  // With operands. workspace: of launch.workspace.bytes.
  void run(void* workspace, cudaStream_t stream) {
    params.workspace = launch.parts(workspace, params);
    if (params.scores.bias.given) {
      params.scores.lowest = {static_cast<int*>(params.workspace.mask_table), params.lse,
                              params.lse_batch_stride, params.shape.seqlen_q};
    }
    kernel.run(params, mask, launch, stream);
  }
};

// Of a value for each pair.
struct PairCall {
  PairEntry kernel;
  PairParams params;
  WindowMask mask;
  bool launches;  // else all values are 0
  PairPlan launch;

  // With operands. workspace: of launch.workspace.bytes.
  void run(void* workspace, cudaStream_t stream) const {
    kernel.run(params, mask, launch, workspace, stream);
  }
};

// lengths: pointers to those that were given; read if the problem is varlen. block_table, table_stride: of a
// cache in pages.
FLASH_CUTE_API ForwardCall plan_forward_call(AttentionProblem const& problem, LengthParams const& lengths,
                                             Gpu const& gpu, int const* block_table = nullptr,
                                             int64_t table_stride = 0);
FLASH_CUTE_API BackwardCall plan_backward_call(AttentionProblem const& problem, LengthParams const& lengths,
                                               Gpu const& gpu, bool needs_dq, bool needs_dkv,
                                               bool deterministic);

// shape: of the values, which are weights or the gradient of a bias.
FLASH_CUTE_API PairCall plan_pair_call(AttentionProblem const& problem, LengthParams const& lengths,
                                       Gpu const& gpu, PairShape const& shape);

// Bytes that hold the workspace of a call on any GPU, for a face that allocates before it knows the GPU; n
// times as many hold that of n times the batch.
FLASH_CUTE_API int64_t forward_workspace(AttentionProblem const& problem);
FLASH_CUTE_API int64_t backward_workspace(AttentionProblem const& problem, bool deterministic);
FLASH_CUTE_API int64_t pair_workspace(AttentionProblem const& problem, PairShape const& shape);

}  // namespace flash_cute
