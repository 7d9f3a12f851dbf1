#include "operand.hpp"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cctype>
#include <cmath>

namespace flash_cute {

using torch::headeronly::DeviceType;

std::ostream& operator<<(std::ostream& text, ShapeOf const& shape) {
  char const* separator = "";
  text << '(';
  for (int64_t const size : shape.sizes) {
    text << separator << size;
    separator = ", ";
  }
  return text << (shape.sizes.size() == 1 ? ",)" : ")");
}

std::ostream& operator<<(std::ostream& text, DtypeOf const& dtype) {
  switch (dtype.type) {
    case ScalarType::Half: return text << "torch.float16";
    case ScalarType::BFloat16: return text << "torch.bfloat16";
    case ScalarType::Float: return text << "torch.float32";
    case ScalarType::Double: return text << "torch.float64";
    case ScalarType::Bool: return text << "torch.bool";
    case ScalarType::Byte: return text << "torch.uint8";
    case ScalarType::Char: return text << "torch.int8";
    case ScalarType::Short: return text << "torch.int16";
    case ScalarType::Int: return text << "torch.int32";
    case ScalarType::Long: return text << "torch.int64";
    case ScalarType::ComplexFloat: return text << "torch.complex64";
    case ScalarType::ComplexDouble: return text << "torch.complex128";
    default:
      text << "torch.";
      for (char const* letter = torch::headeronly::toString(dtype.type); *letter; ++letter) {
        text << char(std::tolower(*letter));
      }
      return text;
  }
}

Operand operand(char const* name, Tensor const& tensor) {
  int64_t const dims = tensor.dim();
  return {name, tensor.sizes(), tensor.scalar_type(), tensor.device(),
          dims > 0 ? tensor.stride(dims - 1) : 1};
}

std::string name_of(Device const& device) {
  std::ostringstream text;
  switch (device.type()) {
    case DeviceType::CPU: text << "cpu"; break;
    case DeviceType::CUDA: text << "cuda"; break;
    case DeviceType::Meta: text << "meta"; break;
    default: text << "of type " << int(device.type());
  }
  if (device.has_index()) text << ':' << int(device.index());
  return text.str();
}

void require_type(Operand const& operand, ScalarType type) {
  require(operand.type == type, operand.name, " has dtype ", DtypeOf{operand.type}, "; ", DtypeOf{type},
          " is accepted");
}

void require_alike_but_for_the_last(Operand const& a, Operand const& b) {
  auto leading = [](Operand const& operand) {
    size_t const dims = operand.sizes.size();
    return IntHeaderOnlyArrayRef(operand.sizes.data(), dims == 0 ? 0 : dims - 1);
  };
  require(a.sizes.size() == b.sizes.size() && std::ranges::equal(leading(a), leading(b)), a.name,
          " has shape ", ShapeOf{a.sizes}, " and ", b.name, " ", ShapeOf{b.sizes},
          "; they must be the same but for the last dimension");
}

void require_same_device(Operand const& operand, Operand const& like) {
  if (operand.device == like.device) return;
  refuse(operand.name, " is on device ", name_of(operand.device), " and ", like.name, " on ",
         name_of(like.device), "; they must be the same");
}

void require_entries(Operand const& length, int64_t entries, int64_t batch) {
  require(length.sizes.size() == 1 && length.sizes[0] == entries, length.name, " has shape ",
          ShapeOf{length.sizes}, "; (", entries, ",), as the batch is ", batch, ", is accepted");
  require(entries <= 1 || length.step == 1, length.name, " has stride ", length.step,
          "; a contiguous tensor is accepted");
}

void require_scale(char const* name, double scale) {
  require(std::isfinite(float(scale)) && float(scale) > 0.f, name, " is ", scale,
          "; a finite number > 0 is accepted");
}

// Three calls of torch for each operand, as a GPU's kernel waits for them.
void require_stored(Operand const& operand, Tensor const& tensor) {
  int64_t *strides = nullptr, elements = 0, stored = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor.get(), &elements));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &stored));
  ++elements;
  for (size_t dim = 0; dim < operand.sizes.size(); ++dim) {
    if (operand.sizes[dim] == 0) return;
    elements += (operand.sizes[dim] - 1) * strides[dim];
  }
  int64_t const bytes = elements * element_bytes(operand.type);
  require(bytes <= stored, operand.name, " must have a storage of at least ", bytes, " bytes, got one of ",
          stored);
}

void require_readable_cache(Operand const& operand, IntHeaderOnlyArrayRef strides, void const* data) {
  if (std::ranges::find(operand.sizes, 0) != operand.sizes.end()) return;
  int const bytes = element_bytes(operand.type);
  require(operand.sizes[3] == 1 || strides[3] == 1, operand.name,
          " is a cache, which is not copied; its last dimension must have stride 1, got ", strides[3]);
  for (int dim = 0; dim < 3; ++dim) {
    require(operand.sizes[dim] <= 1 || strides[dim] * bytes % kRowAlignment == 0, operand.name,
            " is a cache, which is not copied; its stride of dimension ", dim, " must be a multiple of ",
            kRowAlignment / bytes, ", got ", strides[dim]);
  }
  require(reinterpret_cast<uintptr_t>(data) % kRowAlignment == 0, operand.name,
          " is a cache, which is not copied; it must start at a multiple of ", kRowAlignment, " bytes");
}

}  // namespace flash_cute
