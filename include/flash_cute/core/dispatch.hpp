// Finds the compiled kernel for run-time values: the one visitor over the instances of this build.
#pragma once

#include "flash_cute/params.hpp"

namespace flash_cute {

// Calls visitor(Instance<...>{}) for every compiled instance of a pass until one call returns true, and
// returns whether one did. The visitor is instantiated for no instance of the other pass, whose kernels may
// be missing.
template <Pass kPass, class Visitor>
bool visit_instances(Visitor&& visitor) {
#define FLASH_CUTE_COMPILED(pass, family, element, head_dim, variant, head_dim_v)                            \
  if constexpr (Pass::pass == kPass) {                                                                       \
    using Compiled = Instance<Family::family, ElementType::element, head_dim, Variant::variant, head_dim_v>; \
    if (visitor(Compiled{})) return true;                                                                    \
  }
#define FLASH_CUTE_COMPILED_PAIRS(family, element)
#ifdef FLASH_CUTE_WITH_CUDA
#include "flash_cute/compiled.def"
#endif
#undef FLASH_CUTE_COMPILED
#undef FLASH_CUTE_COMPILED_PAIRS
  return false;
}

// A compiled instance of what stores a value of each pair.
template <Family family_, ElementType element_>
struct PairInstance {
  static constexpr Family family = family_;
  static constexpr ElementType element = element_;
};
template <class Visitor>
void visit_pair_instances(Visitor&& visitor) {
#define FLASH_CUTE_COMPILED(pass, family, element, head_dim, variant, head_dim_v)
#define FLASH_CUTE_COMPILED_PAIRS(family, element) \
  visitor(PairInstance<Family::family, ElementType::element>{});
#ifdef FLASH_CUTE_WITH_CUDA
#include "flash_cute/compiled.def"
#endif
#undef FLASH_CUTE_COMPILED
#undef FLASH_CUTE_COMPILED_PAIRS
}

// Calls visitor(Instance<...>{}) for the instance that has the smallest compiled head dims, by their sum,
// which hold these, and returns whether there is one.
template <Pass kPass, class Visitor>
bool visit_instance(Family family, ElementType element, Variant variant, HeadDims head_dims,
                    Visitor&& visitor) {
  auto serves = [&]<class Candidate>(Candidate) {
    return Candidate::family == family && Candidate::element == element && Candidate::variant == variant &&
           Candidate::head_dims.holds(head_dims);
  };
  HeadDims bucket{};
  visit_instances<kPass>([&]<class Candidate>(Candidate candidate) {
    constexpr HeadDims found = Candidate::head_dims;
    if (serves(candidate) && (bucket.qk == 0 || found.qk + found.v < bucket.qk + bucket.v)) bucket = found;
    return false;
  });
  return visit_instances<kPass>([&]<class Candidate>(Candidate candidate) {
    bool const chosen = serves(candidate) && Candidate::head_dims == bucket;
    if (chosen) visitor(candidate);
    return chosen;
  });
}

}  // namespace flash_cute
