// Launches append_kv.
#pragma once

#include "flash_cute/append/kernel.hpp"
#include "flash_cute/append/launch.hpp"
#include "flash_cute/core/check.hpp"

namespace flash_cute {

template <class Element, class Table, class Stored>
void launch_append_kv(AppendParams const& params, cudaStream_t stream) {
  constexpr int kThreads = 256, kWarp = 32, kMostSlices = 65535;
  constexpr auto kernel = append_kv_kernel<Element, Table, Stored>;
  int const items = params.items();
  int const threads_x = smaller(kThreads, kWarp * ceil_div(items, kWarp)), threads_y = kThreads / threads_x;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(ceil_div<int64_t>(params.tokens.count(), threads_y)),
                        smaller(kMostSlices, ceil_div(items, threads_x)));
  config.blockDim = dim3(threads_x, threads_y);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = waits_for_grid_before<kernel>(params.device);
  check(cudaLaunchKernelEx(&config, kernel, params), "launching append_kv");
}

template <ElementType element>
void AppendLaunch<element>::run(AppendParams const& params, cudaStream_t stream) {
  using Element = typename RowElement<element>::type;
  auto launch = [&]<class Stored>() {
    if (params.rotary.is_fp32) {
      launch_append_kv<Element, float, Stored>(params, stream);
    } else {
      launch_append_kv<Element, Element, Stored>(params, stream);
    }
  };
  params.is_fp8 ? launch.template operator()<uint8_t>() : launch.template operator()<Element>();
}

}  // namespace flash_cute
