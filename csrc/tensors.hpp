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

// Why the kernels can't read a tensor where it lies; empty if they can. varlen: sequences differ in length,
// and an entry of the batch has to begin whole rows after the one before.
char const* reason_to_copy(Tensor const& tensor, bool varlen);
std::vector<std::string> reasons_to_copy(AttentionArguments const& arguments, bool varlen);  // "q: why", ...
inline bool is_readable(Tensor const& tensor, bool varlen) { return *reason_to_copy(tensor, varlen) == 0; }

// An operand where a kernel can read it: the tensor itself, or a copy with rows padded to 16 bytes by zeros.
struct Readable {
  Tensor tensor;
  int first;  // row that the kernel starts at

  // Only outputs are written through it: a pointer for writing would make a copy of a copy-on-write input.
  TensorView view() const;
};

// name: for errors. first: the rows before it are not needed; a copy does not have them.
Readable readable(char const* name, Tensor const& whole, bool varlen, int first = 0);

// A result, and the memory where a kernel writes it: its own, or some that finish() copies to it.
struct Target {
  Tensor result, memory;

  Target(char const* name, Tensor const& result, bool varlen);  // name: of the copy, for errors
  explicit Target(Tensor const& result) : result(result), memory(result) {}

  TensorView view(int first = 0) const { return Readable{memory, first}.view(); }
  void finish();
};

// Contiguous memory for a tensor's elements, with head_dim padded (padded_head_dim).
Tensor padded_like(char const* name, Tensor const& tensor);

// cached: are the keys a cache, which has no offsets?
LengthParams length_params(Lengths const& lengths, bool cached = false);

// sinks: contiguous; they must outlive what is returned.
SinkParams sink_params(Tensor const& sinks);

// Of a cache of 8 bits; it must outlive what is returned.
CacheScale cache_scale(std::optional<Tensor> const& scale);

// The tensors that change scores or hide pairs of them, where kernels can read them.
class ScoreTensors {
 public:
  // Says where they lie; they must outlive the launch.
  ScoreTensors(AttentionArguments const& arguments, bool takes_bias_tiles, PairMaskParams& pair_mask,
               ScoreParams& scores);

 private:
  std::optional<Tensor> bias_, slopes_, seed_;
};
// May TMA load tiles of a bias? Keys of all sequences are counted from the first, as its columns are: in
// shared memory a tile begins with a multiple of eight.
bool has_bias_tiles(AttentionProblem const& problem, Lengths const& lengths);
// Is a bias copied, as TMA can't load tiles of it?
bool copies_bias(Tensor const& bias, bool takes_tiles);
inline constexpr char const* kReasonToCopyBias =
    "bias: its rows must be multiples of 16 bytes apart, and its keys neighbours";

// Memory of torch's allocator, on the device of `like`. Each throws one sentence, with the bytes that it
// asked for, if there are not as many.
Tensor as_contiguous(char const* name, Tensor const& tensor);  // the tensor itself, or a copy
RangeParams range_params(std::optional<Tensor> const& ranges);
Tensor allocate(char const* name, Tensor const& like, IntHeaderOnlyArrayRef sizes, ScalarType type);
Tensor allocate_like(char const* name, Tensor const& like);  // as torch.empty_like
Tensor allocate_out(Tensor const& q, Tensor const& v);       // of a forward: (..., v's head_dim), dense
Tensor allocate(char const* name, Tensor const& like, int32_t dtype, int64_t element_bytes,
                std::initializer_list<int64_t> sizes);

}  // namespace flash_cute
