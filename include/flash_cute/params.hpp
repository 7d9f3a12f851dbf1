// What a kernel launch needs, as plain host structs composed by concern. No torch, no CUDA.
#pragma once

#include <cstdint>

#include "flash_cute/attention/mask.hpp"

namespace flash_cute {

enum class Family { sm80, sm90 };
enum class ElementType { fp16, bf16 };

// One compiled kernel. head_dim is a bucket: it serves every head dim up to its size.
template <Family family_, ElementType element_, int head_dim_>
struct Instance {
  static constexpr Family family = family_;
  static constexpr ElementType element = element_;
  static constexpr int head_dim = head_dim_;
};

struct ProblemShape {
  int batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim;
};

// A (batch, head, row, column) view with unit column stride; strides count elements.
struct TensorView {
  void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
};

struct SoftmaxParams {
  float scale_log2;  // what multiplies the scores, > 0, times log2(e): the kernels work in base 2
};

struct DeviceInfo {
  static constexpr int kMaxDevices = 128;
  int index;  // below kMaxDevices
  int multiprocessors;
  int64_t l2_bytes;
};

struct ForwardParams {
  ProblemShape shape;
  TensorView q, k, v, out;
  float* lse;  // (batch, heads_q, seqlen_q), contiguous
  SoftmaxParams softmax;
  WindowMask mask;
  DeviceInfo device;
};

}  // namespace flash_cute
