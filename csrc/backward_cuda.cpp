// The backward on a GPU.
#include "backward.hpp"

namespace flash_cute {
namespace {

[[noreturn]] void refuse() {
  require(false, "q is on a GPU, where there is no backward yet; use the CPU, or torch.no_grad()");
  throw std::logic_error("unreachable");
}

}  // namespace

BackwardResult backward_cuda(BackwardArguments const&) { refuse(); }
std::string backward_plan_cuda(BackwardArguments const&) { refuse(); }

}  // namespace flash_cute
