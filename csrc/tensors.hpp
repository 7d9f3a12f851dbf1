// Tensors as kernels see them, copies of those that they can't read, and what torch allocates for them.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>
#include <string>
#include <vector>

#include "flash_cute/params.hpp"
#include "validate.hpp"

namespace flash_cute {

// A tensor as (batch, heads, rows, head_dim); a packed one, (rows, heads, head_dim), is one entry of a batch.
struct Layout {
  std::array<int64_t, 4> sizes, strides;

  explicit Layout(Tensor const& tensor);
};

constexpr int kRowAlignment = 16;  // bytes; every row of an operand starts at a multiple of it

// head_dim with the columns of 0 that make rows a multiple of it.
inline int padded_head_dim(int64_t head_dim) {
  constexpr int kElements = kRowAlignment / kElementBytes;
  return int(ceil_div(head_dim, int64_t(kElements)) * kElements);
}

// Why the kernels can't read a tensor where it lies; empty if they can. ragged: sequences differ in length,
// and an entry of the batch has to begin whole rows after the one before.
char const* reason_to_copy(Tensor const& tensor, bool ragged);
std::vector<std::string> reasons_to_copy(AttentionArguments const& arguments, bool ragged);  // "q: why", ...
inline bool is_readable(Tensor const& tensor, bool ragged) { return *reason_to_copy(tensor, ragged) == 0; }

// An operand where a kernel can read it: the tensor itself, or a copy with rows padded to 16 bytes by zeros.
struct Readable {
  Tensor tensor;
  int first;  // row that the kernel starts at

  // Only outputs are written through it: a pointer for writing would make a copy of a copy-on-write input.
  TensorView view() const;
};

// name: for errors. first: the rows before it are not needed; a copy does not have them.
Readable readable(char const* name, Tensor const& whole, bool ragged, int first = 0);

// Contiguous memory for a tensor's elements, with head_dim padded (padded_head_dim).
Tensor padded_like(char const* name, Tensor const& tensor);

LengthParams length_params(Lengths const& lengths);

// What both passes know of a call beside its operands. Keys that no query can reach, the first ones, are not
// there for a kernel; the mask stays what it was, as it is aligned to the end of the keys. Of sequences of
// unequal lengths the kernels see to it.
template <class Params>
void set_problem(Params& params, AttentionProblem const& problem, Lengths const& lengths,
                 DeviceInfo const& device) {
  params.shape = problem.shape;
  params.shape.head_dim = padded_head_dim(problem.shape.head_dim);
  params.mask = problem.mask();
  params.device = device;
  params.lse_batch_stride = problem.packed ? 0 : int64_t(problem.shape.heads_q) * problem.shape.seqlen_q;
  if (problem.ragged) {
    params.lengths = length_params(lengths);
  } else {
    params.shape.seqlen_k = params.mask.seqlen_k -= params.mask.first_reachable_key();
  }
}

// Memory of torch's allocator, on the device of `like`. Each throws one sentence, with the bytes that it
// asked for, if there are not as many.
Tensor allocate_like(char const* name, Tensor const& like);  // as torch.empty_like
Tensor allocate(char const* name, Tensor const& like, int32_t dtype, int64_t element_bytes,
                std::initializer_list<int64_t> sizes);

}  // namespace flash_cute
