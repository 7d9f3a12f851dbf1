// Maps the element types of the interface to the types that CUTLASS computes with.
#pragma once

#include <cutlass/numeric_types.h>

#include "flash_cute/params.hpp"

namespace flash_cute {

template <ElementType>
struct ElementOf;
template <>
struct ElementOf<ElementType::fp16> {
  using type = cutlass::half_t;
};
template <>
struct ElementOf<ElementType::bf16> {
  using type = cutlass::bfloat16_t;
};
template <>
struct ElementOf<ElementType::fp32> {
  using type = float;
};
template <>
struct ElementOf<ElementType::tf32> {
  using type = float;
};

}  // namespace flash_cute
