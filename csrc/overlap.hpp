// Whether what is written shares memory with what is read, or elements of it with each other.
#pragma once

#include <initializer_list>

#include "operand.hpp"

namespace flash_cute {

struct NamedTensor {
  Operand const* operand;  // null: there is none
  Tensor const* tensor;
};

// Throws if elements of `written` share memory, with each other or with those of others. Tensors whose
// elements interleave, as slots of one packed buffer, share none. This is exact, but for strides that no
// slicing makes: where the search is given up, the tensors count as overlapping. To be called after
// require_stored.
void require_memory_of_its_own(NamedTensor const& written, std::initializer_list<NamedTensor> others);

}  // namespace flash_cute
