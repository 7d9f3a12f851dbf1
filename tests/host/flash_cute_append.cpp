// append_kv's launch and kernel on the host, a thread after the other, for tests/host/test_append_kernel.py.
// The runtime that launches it is made here.
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>

namespace {

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

}  // namespace

template <class... Args>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)(Args...)) {
  attributes->ptxVersion = 90;
  return cudaSuccess;
}

#include "flash_cute/append/launch.cuh"

cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const* function, void** arguments) {
  auto* const kernel = reinterpret_cast<void (*)(flash_cute::AppendParams)>(const_cast<void*>(function));
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
      for (threadIdx.y = 0; threadIdx.y < blockDim.y; ++threadIdx.y) {
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
          kernel(*static_cast<flash_cute::AppendParams const*>(arguments[0]));
        }
      }
    }
  }
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
char const* cudaGetErrorString(cudaError_t) { return ""; }

namespace {

using namespace flash_cute;

// Addresses are those of torch's data_ptr(), a view is (address, batch, head and row stride).
TensorView view(pybind11::dict const& values, char const* name) {
  if (!values.contains(name)) return {};
  auto const [data, batch, head, row] = values[name].cast<std::array<int64_t, 4>>();
  return {reinterpret_cast<void*>(data), batch, head, row};
}

// (address, batch and head stride).
CacheScale scale(pybind11::dict const& values, char const* name) {
  if (!values.contains(name)) return {};
  auto const [data, batch, head] = values[name].cast<std::array<int64_t, 3>>();
  return {reinterpret_cast<float const*>(data), batch, head};
}

template <class T = int64_t>
T number(pybind11::dict const& values, char const* name, T otherwise = 0) {
  return values.contains(name) ? values[name].cast<T>() : otherwise;
}

template <class T>
T const* pointer(pybind11::dict const& values, char const* name) {
  return reinterpret_cast<T const*>(number(values, name));
}

void append_kv(std::string const& element, pybind11::dict const& values) {
  AppendParams params{};
  params.tokens = {.entries = number<int>(values, "entries"),
                   .rows = Divisor(number<int>(values, "rows")),
                   .rows_q = number<int>(values, "rows_q"),
                   .rows_k = number<int>(values, "rows_k"),
                   .heads_q = number<int>(values, "heads_q"),
                   .heads_kv = number<int>(values, "heads_kv"),
                   .cu_seqlens = pointer<int>(values, "cu_seqlens")};
  params.cache = {.sequences = number<int>(values, "sequences"),
                  .cache_seqlens = pointer<int>(values, "cache_seqlens"),
                  .table = pointer<int>(values, "block_table"),
                  .table_stride = number(values, "table_stride"),
                  .width = number<int>(values, "width", 1),
                  .pages = number<int>(values, "pages"),
                  .page_size = Divisor(number<int>(values, "page_size")),
                  .slots = pointer<int64_t>(values, "slots"),
                  .slot_count = number<int64_t>(values, "slot_count", -1)};
  params.rotary = {.cos = pointer<void>(values, "rotary_cos"),
                   .sin = pointer<void>(values, "rotary_sin"),
                   .positions = pointer<int64_t>(values, "positions"),
                   .positions_stride = number(values, "positions_stride"),
                   .length = number(values, "rotary_length"),
                   .dim = number<int>(values, "rotary_dim"),
                   .interleaved = number<bool>(values, "rotary_interleaved"),
                   .is_fp32 = number<bool>(values, "rotary_is_fp32")};
  params.head_dim = number<int>(values, "head_dim");
  params.head_dim_v = number<int>(values, "head_dim_v");
  int const bytes = element == "fp32" ? 4 : 2;
  params.pairs = Divisor(ceil_div(larger(params.head_dim, params.head_dim_v) * bytes / kAppendChunkBytes, 2));
  params.k = view(values, "k");
  params.v = view(values, "v");
  params.k_cache = view(values, "k_cache");
  params.v_cache = view(values, "v_cache");
  params.q = view(values, "q");
  params.rotated_q = view(values, "rotated_q");
  params.is_fp8 = number<bool>(values, "is_fp8");
  params.k_scale = scale(values, "k_scale");
  params.v_scale = scale(values, "v_scale");
  if (element == "fp16") {
    AppendLaunch<ElementType::fp16>::run(params, nullptr);
  } else if (element == "bf16") {
    AppendLaunch<ElementType::bf16>::run(params, nullptr);
  } else {
    AppendLaunch<ElementType::fp32>::run(params, nullptr);
  }
}

}  // namespace

PYBIND11_MODULE(flash_cute_append, m) { m.def("append_kv", append_kv); }
