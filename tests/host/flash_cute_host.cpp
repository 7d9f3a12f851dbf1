// The device-independent C++ as a Python module, for the tests beside it. Each subject has its file in
// bindings; they are one translation unit, as the headers of pybind11 alone take 30% of its time to compile.
#define FLASH_CUTE_WITH_CUDA  // the dispatcher reads compiled.def, here the one beside this file

#include <type_traits>

#include "bindings/backward_order.hpp"
#include "bindings/backward_plan.hpp"
#include "bindings/core.hpp"
#include "bindings/forward_plan.hpp"
#include "bindings/mask_tables.hpp"
#include "bindings/masks.hpp"
#include "bindings/orders.hpp"
#include "bindings/sequences.hpp"
#include "bindings/softmax.hpp"

// Every offset is a sum of products with one of these: 64 bits wide, or tensors over 2^31 elements break.
using flash_cute::TensorView;
static_assert(std::is_same_v<decltype(TensorView::batch_stride), int64_t>);
static_assert(std::is_same_v<decltype(TensorView::head_stride), int64_t>);
static_assert(std::is_same_v<decltype(TensorView::row_stride), int64_t>);

PYBIND11_MODULE(flash_cute_host, module) {
  using namespace flash_cute::host;
  bind_core(module);
  bind_masks(module);
  bind_sequences(module);
  bind_mask_tables(module);
  bind_orders(module);
  bind_forward_plan(module);
  bind_backward_plan(module);
  bind_backward_order(module);
  bind_softmax(module);
}
