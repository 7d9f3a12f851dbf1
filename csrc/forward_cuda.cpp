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

#include "flash_cute/core/dispatch.hpp"
#include "flash_cute/forward/launch.hpp"

// Weak, so that the same library loads under a torch without CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** stream);

namespace flash_cute {
namespace {

constexpr int kRowAlignment = 16;  // bytes; every row of an operand starts at a multiple of it

void check_cuda(cudaError_t status, char const* doing) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string("flash_cute: ") + doing + " failed: " + cudaGetErrorString(status));
}

struct Device {
  DeviceInfo info;
  int compute_capability;  // 90 for 9.0
};

Device const& device_at(int index) {
  constexpr int kMaxDevices = DeviceInfo::kMaxDevices;
  static Device devices[kMaxDevices];
  static std::once_flag read[kMaxDevices];
  require(index < kMaxDevices, "device index ", index, " is not supported; it must be below ", kMaxDevices);
  std::call_once(read[index], [&] {
    auto attribute = [&](cudaDeviceAttr name) {
      int value = 0;
      check_cuda(cudaDeviceGetAttribute(&value, name, index), "reading the device's properties");
      return value;
    };
    devices[index] = {
        {index, attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrL2CacheSize)},
        10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor)};
  });
  return devices[index];
}

Family family_for(ForwardProblem const& problem, Device const& device) {
  constexpr int kAmpere = 80, kHopper = 90;
  auto compiled = [&](Family family) {
    return visit_instance(family, problem.element, problem.shape.head_dim, [](auto) {});
  };
  int const capability = device.compute_capability;
  require(capability >= kAmpere, "the GPU has compute capability ", capability / 10, ".", capability % 10,
          "; 8.0 (Ampere) and newer are supported");
  if (!problem.family) return capability == kHopper && compiled(Family::sm90) ? Family::sm90 : Family::sm80;
  require(*problem.family != Family::sm90 || capability == kHopper,
          "family is 'sm90', which needs compute capability ", "9.0 (Hopper), but the GPU has ",
          capability / 10, ".", capability % 10);
  return *problem.family;
}

// Calls visitor(Instance<...>{}) for the kernel that serves the problem.
template <class Visitor>
void visit_kernel(ForwardProblem const& problem, Family family, Visitor&& visitor) {
  bool const found = visit_instance(family, problem.element, problem.shape.head_dim, visitor);
  require(found, "this build has no ", name_of(family), " kernel for ", name_of(problem.element),
          " and head_dim ", problem.shape.head_dim, "; flash_cute.supported() lists what it has");
}

TensorView view_of(Tensor const& tensor) {
  auto const strides = tensor.strides();
  return {tensor.data_ptr(), strides[0], strides[1], strides[2]};
}

constexpr int64_t kElementBytes = 2;
constexpr int64_t kRowElements = kRowAlignment / kElementBytes;

// Why the kernels can't read a tensor where it lies; empty if they can.
std::string reason_to_copy(Tensor const& tensor) {
  auto const sizes = tensor.sizes(), strides = tensor.strides();
  if (sizes[3] * kElementBytes % kRowAlignment != 0) return "head_dim is padded to a multiple of 8";
  if (sizes[3] > 1 && strides[3] != 1) return "its last dimension is not contiguous";
  bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kRowAlignment == 0;
  for (int dim = 0; dim < 3; ++dim) {
    aligned = aligned && (sizes[dim] == 1 || strides[dim] * kElementBytes % kRowAlignment == 0);
  }
  return aligned ? "" : "its rows do not start at multiples of 16 bytes";
}

// The tensor itself where a kernel can read it, else a copy with rows padded to 16 bytes by zeros.
Tensor readable(Tensor const& tensor) {
  if (reason_to_copy(tensor).empty()) return tensor;
  auto const sizes = tensor.sizes();
  int64_t const head_dim = sizes[3], padded = ceil_div(head_dim, kRowElements) * kRowElements;
  std::array<int64_t, 4> const target{sizes[0], sizes[1], sizes[2], padded};
  Tensor copy = padded == head_dim ? torch::stable::new_empty(tensor, {target.data(), target.size()})
                                   : torch::stable::new_zeros(tensor, {target.data(), target.size()});
  Tensor columns = torch::stable::narrow(copy, 3, 0, head_dim);
  torch::stable::copy_(columns, tensor);
  return copy;
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
  for (int rank = 0; rank < 4; ++rank) {
    for (int dim = 0; dim < 4; ++dim) {
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
  if (tensor.numel() == 0 || !is_dense(tensor)) return torch::stable::empty_like(tensor);
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  auto const sizes = tensor.sizes(), strides = tensor.strides();
  return empty_strided(tensor, dtype, {sizes[0], sizes[1], sizes[2], sizes[3]},
                       {strides[0], strides[1], strides[2], strides[3]}, 4);
}

// Everything but the pointers of outputs: what both the launch and the plan need.
ForwardParams make_params(ForwardProblem const& problem, DeviceInfo const& device) {
  ForwardParams params{};
  params.shape = problem.shape;
  params.softmax = {problem.softmax_scale, problem.softmax_scale * float(M_LOG2E)};
  params.mask = problem.mask();
  params.device = device;
  return params;
}

// Keys that no query can reach never enter the kernel: K and V start at the first one that counts. The mask
// stays what it was, as it is aligned to the end of the keys.
int cut_unreachable_keys(ForwardParams& params) {
  int const first = params.mask.first_reachable_key();
  for (TensorView* view : {&params.k, &params.v}) {
    if (view->data) view->data = static_cast<char*>(view->data) + first * view->row_stride * kElementBytes;
  }
  params.shape.seqlen_k = params.mask.seqlen_k -= first;
  return first;
}

}  // namespace

ForwardResult forward_cuda(ForwardArguments const& arguments) {
  ForwardProblem const problem = validate(arguments);
  ProblemShape const& shape = problem.shape;
  int const device_index = arguments.q.get_device_index();
  torch::stable::accelerator::DeviceGuard const guard(device_index);
  Device const& device = device_at(device_index);

  Tensor out = allocate_like(arguments.q);
  int64_t const rows = larger(1, shape.seqlen_q);
  Tensor lse =
      empty_strided(arguments.q, aoti_torch_dtype_float32(), {shape.batch, shape.heads_q, shape.seqlen_q},
                    {larger(1, shape.heads_q) * rows, rows, 1}, 3);
  if (lse.numel() == 0) return {out, lse};

  ForwardParams params = make_params(problem, device.info);
  if (params.mask.first_reachable_key() == shape.seqlen_k) {
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
    return {out, lse};
  }

  Tensor const q = readable(arguments.q), k = readable(arguments.k), v = readable(arguments.v);
  // out has q's layout, which may be one that the kernels can't write.
  bool const direct = reason_to_copy(out).empty();
  Tensor const target = direct ? out : torch::stable::new_empty(q, q.sizes());
  params.shape.head_dim = int(q.sizes()[3]);
  params.q = view_of(q);
  params.k = view_of(k);
  params.v = view_of(v);
  params.out = view_of(target);
  params.lse = static_cast<float*>(lse.data_ptr());
  cut_unreachable_keys(params);

  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  visit_kernel(problem, family_for(problem, device), [&]<class Kernel>(Kernel) {
    check_cuda(ForwardLaunch<Kernel>::run(params, static_cast<cudaStream_t>(stream)), "launching the kernel");
  });
  if (!direct) {
    torch::stable::copy_(out, torch::stable::narrow(const_cast<Tensor&>(target), 3, 0, shape.head_dim));
  }
  return {out, lse};
}

std::string plan_cuda(ForwardArguments const& arguments) {
  ForwardProblem const problem = validate(arguments);
  torch::stable::accelerator::DeviceGuard const guard(arguments.q.get_device_index());
  Device const& device = device_at(arguments.q.get_device_index());
  Family const family = family_for(problem, device);

  std::vector<std::string> copies;
  for (auto const& [name, tensor] :
       {std::pair{"q", &arguments.q}, {"k", &arguments.k}, {"v", &arguments.v}}) {
    std::string const reason = reason_to_copy(*tensor);
    if (!reason.empty()) copies.push_back(std::string(name) + ": " + reason);
  }

  JsonObject plan;
  plan.add("family", name_of(family)).add("element", name_of(problem.element)).add("copies", copies);
  visit_kernel(problem, family, [&]<class Kernel>(Kernel) {
    ForwardParams params = make_params(problem, device.info);
    cut_unreachable_keys(params);
    int const seqlen_k_used = params.shape.seqlen_k;
    bool const empty = seqlen_k_used == 0 || arguments.q.numel() == 0;
    if (empty) {  // nothing would be launched; the kernel is described by the smallest problem
      params.shape = {1, 1, 1, 1, 1, problem.shape.head_dim};
      params.mask = WindowMask::make(1, 1, 0, 0);
    }
    LaunchPlan launch{};
    check_cuda(ForwardLaunch<Kernel>::plan(params, launch), "reading the kernel's attributes");
    plan.add("bucket", Kernel::head_dim)
        .add("block_m", launch.tile.block_m)
        .add("block_n", launch.tile.block_n)
        .add("stages", launch.tile.stages)
        .add("packed_heads", launch.packed_heads)
        .add("threads", launch.threads)
        .add("registers", launch.registers)
        .add("local_bytes", launch.local_bytes)
        .add("smem_bytes", launch.smem_bytes)
        .add("grid", empty ? 0 : launch.grid)
        .add("seqlen_k_used", seqlen_k_used);
  });
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
      "torch "
      "has CUDA and without FLASH_CUTE_CPU_ONLY");
}

}  // namespace

ForwardResult forward_cuda(ForwardArguments const&) { refuse(); }
std::string plan_cuda(ForwardArguments const&) { refuse(); }
std::string compiled_kernels() { return "[]"; }

}  // namespace flash_cute

#endif
