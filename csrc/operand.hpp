// A tensor as checks see it, those that all functions share, and how errors show it.
#pragma once

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/tensor.h>

#include <ostream>
#include <string>

#include "problem.hpp"

namespace flash_cute {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Device;
using torch::stable::Tensor;

// Written as Python does.
struct DtypeOf {
  ScalarType type;
};
std::ostream& operator<<(std::ostream& text, DtypeOf const& dtype);

// Likewise, and costs nothing until an error is written.
struct ShapeOf {
  IntHeaderOnlyArrayRef sizes;
};
std::ostream& operator<<(std::ostream& text, ShapeOf const& shape);

// The element type of operands, which validate has seen.
inline ElementType element_of(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return ElementType::fp16;
    case ScalarType::BFloat16: return ElementType::bf16;
    default: return ElementType::fp32;
  }
}

// Is it a type of a cache of 8 bits, whose codes are e4m3?
inline bool is_fp8(ScalarType type) { return type == ScalarType::Float8_e4m3fn || type == ScalarType::Byte; }

// Of the types that are accepted, those of lengths, places and masks among them.
inline int element_bytes(ScalarType type) {
  switch (type) {
    case ScalarType::Bool:
    case ScalarType::Byte:
    case ScalarType::Float8_e4m3fn: return 1;
    case ScalarType::Int: return sizeof(int);
    case ScalarType::Long: return sizeof(int64_t);
    default: return element_bytes(element_of(type));
  }
}

// What is checked of a tensor; one that is only traced has it, too.
struct Operand {
  char const* name;
  IntHeaderOnlyArrayRef sizes;
  ScalarType type;
  Device device;
  int64_t step = 1;  // stride of the last dimension
};
Operand operand(char const* name, Tensor const& tensor);

// Checks that all functions share. Each throws if it does not hold.
void require_type(Operand const& operand, ScalarType type);
void require_same_device(Operand const& operand, Operand const& like);
void require_alike_but_for_the_last(Operand const& a, Operand const& b);      // dimension
void require_entries(Operand const& length, int64_t entries, int64_t batch);  // (entries,), contiguous
void require_scale(char const* name, double scale);                           // for kernels, in float

// Throws if kernels can't read a cache where it lies: name, sizes and strides of a tensor of four dimensions.
void require_readable_cache(Operand const& operand, IntHeaderOnlyArrayRef strides, void const* data);

// Throws if a tensor reaches behind the end of its storage, as one does whose memory was given back.
void require_stored(Operand const& operand, Tensor const& tensor);  // of it

std::string name_of(Device const& device);

}  // namespace flash_cute
