// Run-time values to compiled kernels: the one visitor over the instances of this build.
#pragma once

#include "flash_cute/params.hpp"

namespace flash_cute {

// Calls visitor(Instance<...>{}) for every compiled instance until one call returns true; says whether one
// did.
template <class Visitor>
bool visit_instances(Visitor&& visitor) {
#define FLASH_CUTE_INSTANCE(family, element, head_dim) \
  if (visitor(Instance<Family::family, ElementType::element, head_dim>{})) return true;
#ifdef FLASH_CUTE_WITH_CUDA
#include "flash_cute/compiled.def"
#endif
#undef FLASH_CUTE_INSTANCE
  return false;
}

// Calls visitor(Instance<...>{}) for the smallest compiled head dim that holds this one; says whether there
// is one.
template <class Visitor>
bool visit_instance(Family family, ElementType element, int head_dim, Visitor&& visitor) {
  int bucket = 0;
  visit_instances([&]<class Candidate>(Candidate) {
    bool const fits =
        Candidate::family == family && Candidate::element == element && head_dim <= Candidate::head_dim;
    if (fits && (bucket == 0 || Candidate::head_dim < bucket)) bucket = Candidate::head_dim;
    return false;
  });
  return visit_instances([&]<class Candidate>(Candidate candidate) {
    bool const chosen =
        Candidate::family == family && Candidate::element == element && Candidate::head_dim == bucket;
    if (chosen) visitor(candidate);
    return chosen;
  });
}

}  // namespace flash_cute
