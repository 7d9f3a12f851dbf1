// What a launch of the backward needs beside the mask and the plan, as plain host structs.
#pragma once

#include "flash_cute/backward/workspace.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

struct SinkGradients {
  SinkParams of;              // logits null: not asked for
  void* gradients = nullptr;  // like the logits
  float* shares = nullptr;    // (heads_q, blocks of queries), what each adds to its head's gradient
};

struct BackwardParams {
  ProblemShape shape;
  int element_bytes;  // of all operands but lse and dlse
  int gqa_parts = 1;  // shape.heads_kv is as many times the heads that K and V have
  TensorView q, k, v, out;
  TensorView dout;        // data null: no gradient of out
  TensorView dq, dk, dv;  // data null: not asked for
  float const* lse;       // as ForwardParams::lse
  float const* dlse;      // likewise; null: no gradient of the LSE
  int64_t lse_batch_stride;
  float softmax_scale;
  DeviceInfo device;
  LengthParams lengths;
  RangeParams ranges;
  BackwardWorkspace workspace;
  SinkGradients sinks;
  PairMaskParams pair_mask;
  ScoreParams scores;

  Masking masking() const { return masking_of(ranges, pair_mask, scores); }
  Scores asked_scores() const { return scores_of(pair_mask, scores); }
  FLASH_CUTE_HOST_DEVICE int heads_of_keys() const { return shape.heads_kv / gqa_parts; }

  // As the kernels after varlen_prepare see it.
  BackwardParams with_ordered_offsets() const {
    BackwardParams params = *this;
    if (workspace.varlen.offsets_q) params.lengths.cu_seqlens_q = workspace.varlen.offsets_q;
    if (workspace.varlen.offsets_k) params.lengths.cu_seqlens_k = workspace.varlen.offsets_k;
    return params;
  }
};

}  // namespace flash_cute
