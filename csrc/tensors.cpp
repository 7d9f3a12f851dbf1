#include "tensors.hpp"

#ifdef FLASH_CUTE_WITH_CUDA

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>

#include "flash_cute/core/check.hpp"

namespace flash_cute {
namespace {

// What allocate() gives. It fails without a reason: torch keeps the exception on its side of the stable ABI.
template <class Allocate>
Tensor allocated(char const* name, int64_t elements, int64_t element_bytes, Allocate&& allocate) {
  try {
    return allocate();
  } catch (std::runtime_error const&) {
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "allocating");  // tells an error of a kernel before
    refuse("out of memory: ", elements * element_bytes, " bytes for ", name,
           " could not be allocated; the GPU has ", free, " of ", total, " bytes free");
  }
}

Tensor empty_strided(Tensor const& like, int32_t dtype, std::array<int64_t, 4> const& sizes,
                     std::array<int64_t, 4> const& strides, int64_t dims) {
  int32_t device_type = 0;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes.data(), strides.data(), dtype, device_type,
                                                  like.get_device_index(), &handle));
  return Tensor(handle);
}

// Do the elements fill their memory without gaps or overlaps, in whatever order of dimensions?
bool is_dense(Tensor const& tensor) {
  auto const sizes = tensor.sizes(), strides = tensor.strides();
  int64_t expected = 1;
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      if (sizes[dim] != 1 && strides[dim] == expected) {
        expected *= sizes[dim];
        break;
      }
    }
  }
  return expected == tensor.numel();
}

}  // namespace

Layout::Layout(Tensor const& tensor) {
  auto const size = tensor.sizes(), stride = tensor.strides();
  if (size.size() == 3) {
    sizes = {1, size[1], size[0], size[2]};
    strides = {0, stride[1], stride[0], stride[2]};
  } else {
    sizes = {size[0], size[1], size[2], size[3]};
    strides = {stride[0], stride[1], stride[2], stride[3]};
  }
  // A single row's stride says nothing; this one has entries begin whole rows after each other.
  if (sizes[2] == 1) strides[2] = sizes[0] > 1 && strides[0] > 0 ? strides[0] : sizes[3];
}

char const* reason_to_copy(Tensor const& tensor, bool varlen) {
  auto const [sizes, strides] = Layout(tensor);
  int const bytes = element_bytes(tensor.scalar_type());
  if (sizes[3] * bytes % kRowAlignment != 0) return "head_dim is padded to rows of a multiple of 16 bytes";
  if (sizes[3] > 1 && strides[3] != 1) return "its last dimension is not contiguous";
  bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kRowAlignment == 0;
  for (int dim = 0; dim < 3; ++dim) {
    aligned = aligned && (sizes[dim] == 1 || strides[dim] * bytes % kRowAlignment == 0);
  }
  if (!aligned) return "its rows do not start at multiples of 16 bytes";
  if (!varlen || sizes[0] == 1 || strides[0] == 0) return "";
  bool const whole_rows = strides[2] > 0 && strides[0] % strides[2] == 0;
  if (!whole_rows) return "its batch stride is no multiple of its row stride";
  bool const within_int = sizes[0] * (strides[0] / strides[2]) < std::numeric_limits<int>::max();
  return within_int ? "" : "its last row is too many rows behind its first";
}

std::vector<std::string> reasons_to_copy(AttentionArguments const& arguments, bool varlen) {
  std::vector<std::string> reasons;
  for (auto const& [name, tensor] :
       {std::pair{"q", &arguments.q}, {"k", &arguments.k}, {"v", &arguments.v}}) {
    std::string const reason = reason_to_copy(*tensor, varlen);
    if (!reason.empty()) reasons.push_back(std::string(name) + ": " + reason);
  }
  return reasons;
}

TensorView Readable::view() const {
  auto const [sizes, strides] = Layout(tensor);
  auto* const data = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
  int64_t const batch_stride = sizes[0] == 1 ? 0 : strides[0];
  int64_t const before = first * strides[2] * element_bytes(tensor.scalar_type());
  return {data + before, batch_stride, strides[1], strides[2]};
}

Readable readable(char const* name, Tensor const& whole, bool varlen, int first) {
  if (is_readable(whole, varlen)) return {whole, first};
  Tensor const tensor =
      first == 0 ? whole
                 : torch::stable::narrow(const_cast<Tensor&>(whole), 2, first, whole.sizes()[2] - first);
  Tensor copy = padded_like(name, tensor);
  int64_t const dims = tensor.dim(), head_dim = tensor.size(dims - 1);
  if (copy.size(dims - 1) != head_dim) torch::stable::zero_(copy);
  Tensor columns = torch::stable::narrow(copy, dims - 1, 0, head_dim);
  torch::stable::copy_(columns, tensor);
  return {copy, 0};
}

Target::Target(char const* name, Tensor const& result, bool varlen)
    : result(result), memory(is_readable(result, varlen) ? result : padded_like(name, result)) {
  memory.mutable_data_ptr();  // one that is copied on write has memory of its own from here on
}

void Target::finish() {
  if (memory.get() == result.get() || result.numel() == 0) return;
  int64_t const dims = result.dim(), head_dim = result.size(dims - 1);
  torch::stable::copy_(result, torch::stable::narrow(memory, dims - 1, 0, head_dim));
}

Tensor padded_like(char const* name, Tensor const& tensor) {
  auto const sizes = tensor.sizes();
  size_t const dims = sizes.size();
  int64_t const head_dim = sizes[dims - 1],
                padded = padded_head_dim(head_dim, element_bytes(tensor.scalar_type()));
  std::array<int64_t, 4> target{};
  for (size_t dim = 0; dim < dims; ++dim) target[dim] = dim + 1 < dims ? sizes[dim] : padded;
  return allocate(name, tensor, {target.data(), dims}, tensor.scalar_type());
}

// torch's own goes through the dispatcher even where there is nothing to do.
Tensor as_contiguous(char const* name, Tensor const& tensor) {
  if (tensor.is_contiguous()) return tensor;
  return allocated(name, tensor.numel(), element_bytes(tensor.scalar_type()),
                   [&] { return torch::stable::contiguous(tensor); });
}

Tensor allocate(char const* name, Tensor const& like, IntHeaderOnlyArrayRef sizes, ScalarType type) {
  int64_t elements = 1;
  for (int64_t const size : sizes) elements *= size;
  return allocated(name, elements, element_bytes(type),
                   [&] { return torch::stable::new_empty(like, sizes, type); });
}

SinkParams sink_params(Tensor const& sinks) {
  return {sinks.const_data_ptr(), sinks.scalar_type() == ScalarType::Float};
}

CacheScale cache_scale(std::optional<Tensor> const& scale) {
  if (!scale) return {};
  int64_t const dims = scale->dim();
  return {.data = static_cast<float const*>(scale->const_data_ptr()),
          .entry_stride = dims == 2 ? scale->stride(0) : 0,
          .head_stride = dims > 0 ? scale->stride(dims - 1) : 0};
}

LengthParams length_params(Lengths const& lengths, bool cached) {
  auto pointer = [](std::optional<Tensor> const& tensor) {
    return tensor ? static_cast<int const*>(tensor->const_data_ptr()) : nullptr;
  };
  return {.cu_seqlens_q = pointer(lengths.cu_seqlens_q),
          .cu_seqlens_k =
              cached ? nullptr : pointer(lengths.cu_seqlens_k ? lengths.cu_seqlens_k : lengths.cu_seqlens_q),
          .seqused_q = pointer(lengths.seqused_q),
          .seqused_k = pointer(lengths.seqused_k),
          .leftpad_k = pointer(lengths.leftpad_k)};
}

RangeParams range_params(std::optional<Tensor> const& ranges) {
  if (!ranges) return {};
  auto const sizes = ranges->sizes();
  bool const differ = sizes.size() == 5 && sizes[0] > 1;  // else one entry stands for all
  return {.given = static_cast<int const*>(ranges->const_data_ptr()),
          .entry_stride = differ ? ranges->stride(0) : 0,
          .count = int(sizes[sizes.size() - 2])};
}

namespace {

// The stride of a dimension that may have one entry for all.
int64_t stride_of(Tensor const& tensor, int dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim); }

// Can TMA load tiles of a bias? Keys are neighbours, and other strides multiples of 16 bytes.
bool is_tiled(Tensor const& bias) {
  int const bytes = element_bytes(bias.scalar_type());
  bool aligned = reinterpret_cast<uintptr_t>(bias.const_data_ptr()) % kRowAlignment == 0;
  for (int dim : {0, 1, 2}) aligned &= stride_of(bias, dim) * bytes % kRowAlignment == 0;
  return aligned && bias.stride(3) == 1;
}

// All of them where one entry stands for all, of whatever size the tensor is.
int sequences_of_entry(Tensor const& q, Tensor const& bias) {
  int64_t const batch = larger<int64_t>(1, q.size(0)), entries = larger<int64_t>(1, bias.size(0));
  return int(stride_of(bias, 0) == 0 ? batch : batch / entries);
}

// With rows that begin at multiples of 16 bytes.
Tensor aligned_copy(Tensor const& bias) {
  int64_t const elements = kRowAlignment / element_bytes(bias.scalar_type());
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(bias.get(), &dtype));
  int64_t const columns = ceil_div(bias.size(3), elements) * elements;
  Tensor memory = allocate("a copy of bias", bias, dtype, element_bytes(bias.scalar_type()),
                           {bias.size(0), bias.size(1), bias.size(2), columns});
  Tensor copy = torch::stable::narrow(memory, 3, 0, bias.size(3));
  torch::stable::copy_(copy, bias);
  return copy;
}

}  // namespace

bool has_bias_tiles(AttentionProblem const& problem, Lengths const& lengths) {
  return has_bias_tiles(problem, lengths.seqused_q || lengths.seqused_k, lengths.leftpad_k.has_value());
}

bool copies_bias(Tensor const& bias, bool takes_tiles) {
  return takes_tiles && bias.size(3) > 1 && !is_tiled(bias);
}

ScoreTensors::ScoreTensors(AttentionArguments const& arguments, bool takes_bias_tiles,
                           PairMaskParams& pair_mask, ScoreParams& scores) {
  if (auto const& mask = arguments.mask) {
    pair_mask.data = static_cast<uint8_t const*>(mask->const_data_ptr());
    pair_mask.entry_stride = stride_of(*mask, 0);
    pair_mask.head_stride = stride_of(*mask, 1);
    pair_mask.row_stride = stride_of(*mask, 2);
    pair_mask.byte_stride = mask->stride(3);
  }
  if (arguments.bias) {
    bias_ = copies_bias(*arguments.bias, takes_bias_tiles) ? aligned_copy(*arguments.bias) : arguments.bias;
    Tensor const* const bias = &*bias_;
    scores.bias = {.data = bias->const_data_ptr(),
                   .given = true,
                   .is_tiled = takes_bias_tiles && bias->size(3) > 1,
                   .sequences_of_entry = sequences_of_entry(arguments.q, *bias),
                   .rows = int(arguments.q.size(2)),
                   .columns = int(arguments.k.size(2)),
                   .entry_stride = stride_of(*bias, 0),
                   .head_stride = stride_of(*bias, 1),
                   .row_stride = stride_of(*bias, 2),
                   .key_stride = stride_of(*bias, 3)};
  }
  if (arguments.alibi_slopes) {
    slopes_ = as_contiguous("a copy of alibi_slopes", *arguments.alibi_slopes);
    scores.slopes = static_cast<float const*>(slopes_->const_data_ptr());
    scores.slopes_stride = slopes_->dim() == 2 ? int(slopes_->size(1)) : 0;
  }
  if (arguments.dropout_seed) {
    seed_ = as_contiguous("a copy of dropout_seed", *arguments.dropout_seed);
    scores.dropout.seed = static_cast<int64_t const*>(seed_->const_data_ptr());
  }
}

// torch.empty_like, which costs the host 2 us more through the dispatcher; most q are dense.
Tensor allocate_like(char const* name, Tensor const& tensor) {
  return allocated(name, tensor.numel(), element_bytes(tensor.scalar_type()), [&] {
    if (tensor.numel() == 0 || !is_dense(tensor)) return torch::stable::empty_like(tensor);
    int32_t dtype = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
    std::array<int64_t, 4> sizes{}, strides{};
    int64_t const dims = tensor.dim();
    for (int64_t dim = 0; dim < dims; ++dim) {
      sizes[dim] = tensor.sizes()[dim];
      strides[dim] = tensor.strides()[dim];
    }
    return empty_strided(tensor, dtype, sizes, strides, dims);
  });
}

Tensor allocate_out(Tensor const& q, Tensor const& v) {
  int64_t const dims = q.dim(), width = v.size(v.dim() - 1);
  if (width == q.size(dims - 1)) return allocate_like("out", q);
  std::array<int64_t, 4> sizes{}, strides{};
  std::copy(q.sizes().begin(), q.sizes().end(), sizes.begin());
  sizes[dims - 1] = width;
  // The other dimensions in q's order, the outermost first.
  std::array<int64_t, 3> order{0, 1, 2};
  std::stable_sort(order.begin(), order.begin() + dims - 1,
                   [&](int64_t a, int64_t b) { return q.stride(a) > q.stride(b); });
  strides[dims - 1] = 1;
  int64_t step = larger<int64_t>(1, width);
  for (int64_t place = dims - 1; place-- > 0;) {
    strides[order[place]] = step;
    step *= larger<int64_t>(1, sizes[order[place]]);
  }
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(q.get(), &dtype));
  return allocated("out", step, element_bytes(q.scalar_type()),
                   [&] { return empty_strided(q, dtype, sizes, strides, dims); });
}

Tensor allocate(char const* name, Tensor const& like, int32_t dtype, int64_t element_bytes,
                std::initializer_list<int64_t> sizes) {
  std::array<int64_t, 4> dims{}, strides{};
  std::copy(sizes.begin(), sizes.end(), dims.begin());
  int64_t step = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = step;
    step *= larger<int64_t>(1, dims[dim]);
  }
  return allocated(name, step, element_bytes,
                   [&] { return empty_strided(like, dtype, dims, strides, int64_t(sizes.size())); });
}

}  // namespace flash_cute

#endif
