// The forward on a GPU: tensors to params, the choice of a kernel, the launch.
#include "forward.hpp"
#include "plan.hpp"

#ifdef FLASH_CUTE_WITH_CUDA

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cmath>
#include <limits>
#include <mutex>

#include "flash_cute/core/check.hpp"
#include "flash_cute/core/dispatch.hpp"
#include "flash_cute/forward/launch.hpp"

// Weak, so that the same library loads under a torch without CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** stream);

namespace flash_cute {
namespace {

constexpr int kRowAlignment = 16;  // bytes; every row of an operand starts at a multiple of it

struct Gpu {
  DeviceInfo info;
  int compute_capability;  // 90 for 9.0
};

Gpu const& gpu_at(int index) {
  constexpr int kMaxDevices = DeviceInfo::kMaxDevices;
  static Gpu devices[kMaxDevices];
  static std::once_flag read[kMaxDevices];
  require(index < kMaxDevices, "device index ", index, " is not supported; it must be below ", kMaxDevices);
  std::call_once(read[index], [&] {
    auto attribute = [&](cudaDeviceAttr name) {
      int value = 0;
      check(cudaDeviceGetAttribute(&value, name, index), "reading the device's properties");
      return value;
    };
    devices[index] = {
        {index, attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrL2CacheSize)},
        10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor)};
  });
  return devices[index];
}

Family family_for(ForwardProblem const& problem, Gpu const& gpu) {
  constexpr int kAmpere = 80, kHopper = 90;
  auto compiled = [&](Family family) {
    return visit_instance(family, problem.element, problem.shape.head_dim, [](auto) {});
  };
  int const capability = gpu.compute_capability;
  require(capability >= kAmpere, "the GPU has compute capability ", capability / 10, ".", capability % 10,
          "; 8.0 (Ampere) and newer are supported");
  if (!problem.family) return capability == kHopper && compiled(Family::sm90) ? Family::sm90 : Family::sm80;
  require(*problem.family != Family::sm90 || capability == kHopper,
          "family is 'sm90', which needs compute capability ", "9.0 (Hopper), but the GPU has ",
          capability / 10, ".", capability % 10);
  return *problem.family;
}

struct Kernel {
  Family family;
  int head_dim;  // the largest that it serves
  decltype(&ForwardLaunch<void>::run) run;
  decltype(&ForwardLaunch<void>::workspace_bytes) workspace_bytes;
  decltype(&ForwardLaunch<void>::plan) plan;
};

// The compiled kernel that serves the problem.
Kernel kernel_for(ForwardProblem const& problem, Gpu const& gpu) {
  Family const family = family_for(problem, gpu);
  Kernel kernel{};
  bool const found =
      visit_instance(family, problem.element, problem.shape.head_dim, [&]<class Instance>(Instance) {
        kernel = {family, Instance::head_dim, ForwardLaunch<Instance>::run,
                  ForwardLaunch<Instance>::workspace_bytes, ForwardLaunch<Instance>::plan};
      });
  require(found, "this build has no ", name_of(family), " kernel for ", name_of(problem.element),
          " and head_dim ", problem.shape.head_dim, "; flash_cute.supported() lists what it has");
  return kernel;
}

constexpr int64_t kElementBytes = 2;
constexpr int64_t kRowElements = kRowAlignment / kElementBytes;

// A tensor as (batch, heads, rows, head_dim); a packed one, (rows, heads, head_dim), is one entry of a batch.
struct Layout {
  std::array<int64_t, 4> sizes, strides;

  explicit Layout(Tensor const& tensor) {
    auto const size = tensor.sizes(), stride = tensor.strides();
    if (size.size() == 3) {
      sizes = {1, size[1], size[0], size[2]};
      strides = {0, stride[1], stride[0], stride[2]};
    } else {
      sizes = {size[0], size[1], size[2], size[3]};
      strides = {stride[0], stride[1], stride[2], stride[3]};
    }
  }
};

// Why the kernels can't read a tensor where it lies; empty if they can. ragged: sequences differ in length,
// and an entry of the batch has to begin whole rows after the one before.
std::string reason_to_copy(Tensor const& tensor, bool ragged) {
  auto const [sizes, strides] = Layout(tensor);
  if (sizes[3] * kElementBytes % kRowAlignment != 0) return "head_dim is padded to a multiple of 8";
  if (sizes[3] > 1 && strides[3] != 1) return "its last dimension is not contiguous";
  bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kRowAlignment == 0;
  for (int dim = 0; dim < 3; ++dim) {
    bool const unused = sizes[dim] == 1 && !(ragged && dim == 2);
    aligned = aligned && (unused || strides[dim] * kElementBytes % kRowAlignment == 0);
  }
  if (!aligned) return "its rows do not start at multiples of 16 bytes";
  if (!ragged || sizes[0] == 1 || strides[0] == 0) return "";
  bool const whole_rows = strides[2] > 0 && strides[0] % strides[2] == 0;
  if (!whole_rows) return "its batch stride is no multiple of its row stride";
  bool const within_int = sizes[0] * (strides[0] / strides[2]) < std::numeric_limits<int>::max();
  return within_int ? "" : "its last row is too many rows behind its first";
}

// What allocate() gives. It fails without a reason: torch keeps the exception on its side of the stable ABI.
template <class Allocate>
Tensor allocated(char const* name, int64_t elements, int64_t element_bytes, Allocate&& allocate) {
  try {
    return allocate();
  } catch (std::runtime_error const&) {
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "allocating");  // tells an error of a kernel before
    require(false, "out of memory: ", elements * element_bytes, " bytes for ", name,
            " could not be allocated; the GPU has ", free, " of ", total, " bytes free");
    throw;
  }
}

// An operand where a kernel can read it: the tensor itself, or a copy with rows padded to 16 bytes by zeros.
struct Readable {
  Tensor tensor;
  int first;  // row that the kernel starts at

  // Only outputs are written through it: a pointer for writing would make a copy of a copy-on-write input.
  TensorView view() const {
    auto const [sizes, strides] = Layout(tensor);
    auto* const data = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
    int64_t const batch_stride = sizes[0] == 1 ? 0 : strides[0];
    return {data + first * strides[2] * kElementBytes, batch_stride, strides[1], strides[2]};
  }
};

// first: the rows before it are not needed; a copy does not have them.
Readable readable(char const* name, Tensor const& whole, bool ragged, int first = 0) {
  if (reason_to_copy(whole, ragged).empty()) return {whole, first};
  Tensor const tensor =
      first == 0 ? whole
                 : torch::stable::narrow(const_cast<Tensor&>(whole), 2, first, whole.sizes()[2] - first);
  auto const sizes = tensor.sizes();
  size_t const dims = sizes.size();
  int64_t const head_dim = sizes[dims - 1], padded = ceil_div(head_dim, kRowElements) * kRowElements;
  std::array<int64_t, 4> target{};
  for (size_t dim = 0; dim < dims; ++dim) target[dim] = dim + 1 < dims ? sizes[dim] : padded;
  Tensor copy = allocated(name, tensor.numel() / larger<int64_t>(1, head_dim) * padded, kElementBytes, [&] {
    return padded == head_dim ? torch::stable::new_empty(tensor, {target.data(), dims})
                              : torch::stable::new_zeros(tensor, {target.data(), dims});
  });
  Tensor columns = torch::stable::narrow(copy, int64_t(dims) - 1, 0, head_dim);
  torch::stable::copy_(columns, tensor);
  return {copy, 0};
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

// torch.empty_like, which costs the host 2 us more through the dispatcher; most q are dense.
Tensor allocate_like(Tensor const& tensor) {
  return allocated("out", tensor.numel(), kElementBytes, [&] {
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

Tensor allocate_lse(Tensor const& q, ForwardProblem const& problem) {
  ProblemShape const& shape = problem.shape;
  int64_t const heads = larger(1, shape.heads_q), rows = larger(1, shape.seqlen_q);
  int64_t const entries = problem.packed ? 1 : shape.batch;
  return allocated("lse", entries * heads * rows, sizeof(float), [&] {
    int32_t const type = aoti_torch_dtype_float32();
    if (problem.packed) return empty_strided(q, type, {shape.heads_q, shape.seqlen_q}, {rows, 1}, 2);
    return empty_strided(q, type, {shape.batch, shape.heads_q, shape.seqlen_q}, {heads * rows, rows, 1}, 3);
  });
}

Tensor allocate_bytes(Tensor const& like, int64_t bytes) {
  return allocated("the list of tiles", bytes, 1,
                   [&] { return empty_strided(like, aoti_torch_dtype_uint8(), {bytes}, {1}, 1); });
}

int const* pointer_to(std::optional<Tensor> const& lengths) {
  return lengths ? static_cast<int const*>(lengths->const_data_ptr()) : nullptr;
}

// What both the launch and the plan need. Keys that no query can reach, the first ones, are not there for a
// kernel; the mask stays what it was, as it is aligned to the end of the keys. Of sequences of unequal
// lengths the kernels see to it.
ForwardParams make_params(ForwardProblem const& problem, Lengths const& lengths, DeviceInfo const& device) {
  ForwardParams params{};
  params.shape = problem.shape;
  params.softmax = {problem.softmax_scale * float(M_LOG2E)};
  params.mask = problem.mask();
  params.device = device;
  params.lse_batch_stride = problem.packed ? 0 : int64_t(problem.shape.heads_q) * problem.shape.seqlen_q;
  if (problem.ragged) {
    params.lengths = {.cu_seqlens_q = pointer_to(lengths.offsets_q()),
                      .cu_seqlens_k = pointer_to(lengths.offsets_k()),
                      .seqused_q = pointer_to(lengths.seqused_q),
                      .seqused_k = pointer_to(lengths.seqused_k),
                      .leftpad_k = pointer_to(lengths.leftpad_k),
                      .given = true};
  } else {
    params.shape.seqlen_k = params.mask.seqlen_k -= params.mask.first_reachable_key();
  }
  return params;
}

}  // namespace

ForwardResult forward_cuda(ForwardArguments const& arguments) {
  ForwardProblem const problem = validate(arguments);
  ProblemShape const& shape = problem.shape;
  int const device_index = arguments.q.get_device_index();
  torch::stable::accelerator::DeviceGuard const guard(device_index);
  Gpu const& gpu = gpu_at(device_index);
  Kernel const kernel = kernel_for(problem, gpu);

  Tensor out = allocate_like(arguments.q);
  Tensor lse = allocate_lse(arguments.q, problem);
  if (lse.numel() == 0) return {out, lse};

  ForwardParams params = make_params(problem, arguments.lengths, gpu.info);
  int const keys = params.shape.seqlen_k, unreachable = shape.seqlen_k - keys;
  if (keys == 0 || shape.batch == 0) {
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
    return {out, lse};
  }

  bool const ragged = problem.ragged;
  Readable const q = readable("a copy of q", arguments.q, ragged);
  Readable const k = readable("a copy of k", arguments.k, ragged, unreachable);
  Readable const v = readable("a copy of v", arguments.v, ragged, unreachable);
  // out has q's layout, which may be one that the kernels can't write.
  bool const direct = reason_to_copy(out, ragged).empty();
  Tensor const target = direct ? out : allocated("a copy of out", q.tensor.numel(), kElementBytes, [&] {
    return torch::stable::new_empty(q.tensor, q.tensor.sizes());
  });
  params.shape.head_dim = int(Layout(q.tensor).sizes[3]);
  params.q = q.view();
  params.k = k.view();
  params.v = v.view();
  params.out = Readable{target, 0}.view();
  params.lse = static_cast<float*>(lse.mutable_data_ptr());

  std::optional<Tensor> list;
  if (ragged) {
    list = allocate_bytes(out, kernel.workspace_bytes(params));
    params.lengths.workspace = list->mutable_data_ptr();
  }
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  kernel.run(params, static_cast<cudaStream_t>(stream));
  if (!direct) {
    torch::stable::copy_(
        out, torch::stable::narrow(const_cast<Tensor&>(target), target.dim() - 1, 0, shape.head_dim));
  }
  return {out, lse};
}

std::string plan_cuda(ForwardArguments const& arguments) {
  ForwardProblem const problem = validate(arguments);
  torch::stable::accelerator::DeviceGuard const guard(arguments.q.get_device_index());
  Gpu const& gpu = gpu_at(arguments.q.get_device_index());
  Kernel const kernel = kernel_for(problem, gpu);
  ForwardParams params = make_params(problem, arguments.lengths, gpu.info);
  int const seqlen_k_used = params.shape.seqlen_k;

  std::vector<std::string> copies;
  for (auto const& [name, tensor] :
       {std::pair{"q", &arguments.q}, {"k", &arguments.k}, {"v", &arguments.v}}) {
    std::string const reason = reason_to_copy(*tensor, problem.ragged);
    if (!reason.empty()) copies.push_back(std::string(name) + ": " + reason);
  }

  bool const empty = seqlen_k_used == 0 || arguments.q.numel() == 0 || problem.shape.batch == 0;
  if (empty) {  // nothing would be launched; the kernel is described by the smallest problem
    params.shape = {1, 1, 1, 1, 1, problem.shape.head_dim};
    params.mask = WindowMask::make(1, 1, 0, 0);
    params.lengths = {};
  } else if (problem.ragged) {  // the plan asks for strides
    params.q = Readable{arguments.q, 0}.view();
    params.k = Readable{arguments.k, 0}.view();
    params.v = Readable{arguments.v, 0}.view();
    params.out = params.q;
  }
  LaunchPlan const launch = kernel.plan(params);
  JsonObject plan;
  plan.add("family", name_of(kernel.family))
      .add("element", name_of(problem.element))
      .add("copies", copies)
      .add("bucket", kernel.head_dim)
      .add("block_m", launch.tile.block_m)
      .add("block_n", launch.tile.block_n)
      .add("stages", launch.tile.stages)
      .add("packed_heads", launch.packed_heads)
      .add("threads", launch.threads)
      .add("registers", launch.registers)
      .add("local_bytes", launch.local_bytes)
      .add("smem_bytes", launch.smem_bytes)
      .add("grid", empty ? 0 : launch.grid)
      .add("workspace_bytes", launch.workspace_bytes)
      .add("seqlen_k_used", seqlen_k_used);
  return add_problem(plan, problem).text();
}

std::string compiled_kernels() {
  std::string list;
  visit_instances([&]<class Kernel>(Kernel) {
    for (auto const& [tile, smem_bytes] : ForwardLaunch<Kernel>::tiles()) {
      JsonObject shape, kernel;
      shape.add("block_m", tile.block_m)
          .add("block_n", tile.block_n)
          .add("stages", tile.stages)
          .add("warps", tile.warps);
      kernel.add("family", name_of(Kernel::family))
          .add("element", name_of(Kernel::element))
          .add("head_dim", Kernel::head_dim)
          .add_raw("tile", shape.text())
          .add("smem_bytes", smem_bytes);
      list += (list.empty() ? "" : ", ") + kernel.text();
    }
    return false;
  });
  return '[' + list + ']';
}

}  // namespace flash_cute

#else

namespace flash_cute {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error(
      "flash_cute.forward: q is on a GPU, but this flash_cute was built without CUDA; install it again where "
      "torch has CUDA and without FLASH_CUTE_CPU_ONLY");
}

}  // namespace

ForwardResult forward_cuda(ForwardArguments const&) { refuse(); }
std::string plan_cuda(ForwardArguments const&) { refuse(); }
std::string compiled_kernels() { return "[]"; }

}  // namespace flash_cute

#endif
