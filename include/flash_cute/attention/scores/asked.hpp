// What a call asks of general scores, as a type, for loops of their own: where pairs are hidden and nothing
// else, one that looks for all of it takes a fifth longer.
#pragma once

#include "flash_cute/core/element.hpp"
#include "flash_cute/params.hpp"

namespace flash_cute {

// Scores may be changed; pairs may be dropped.
template <bool may_change, bool may_drop>
struct Asked {
  static constexpr bool kMayChange = may_change, kMayDrop = may_drop;

  CUTE_DEVICE static bool drops(ScoreParams const& params) {
    return kMayDrop && (!kMayChange || params.dropout.drops());
  }
};

// Calls visit(Asked<...>{}). kTellsDropout: is there a loop for dropout alone, too?
template <bool kTellsDropout, class Visit>
CUTE_DEVICE void visit_asked(ScoreParams const& params, Visit&& visit) {
  bool const changes = params.change(), drops = params.dropout.drops();
  if (changes || (drops && !kTellsDropout)) {
    visit(Asked<true, true>{});
  } else if (drops) {
    visit(Asked<false, kTellsDropout>{});
  } else {
    visit(Asked<false, false>{});
  }
}

}  // namespace flash_cute
