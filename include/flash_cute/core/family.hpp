// What plans and preparation ask of a kernel family, so that they name none.
#pragma once

#include "flash_cute/params.hpp"

namespace flash_cute {

constexpr int kWarpgroupRows = 64;  // of a WGMMA: a group of rows on Hopper

struct FamilyTraits {
  bool persistent;   // a thread block of the forward goes through many tiles
  bool packs_heads;  // heads that share keys share a tile where their queries are few, with whole keys
  int group_rows;    // of a forward tile, those that a group of warps has by itself; 0: all
  bool one_backward_kernel;  // dQ, dK and dV come from one kernel, whatever is asked for
  bool cuts_masked_rows;     // in the backward, sequences begin after their fully masked queries
  bool knows_scores;         // where the mask is a table, does it have kernels for less than general scores?
  int most_multiprocessors;  // of any GPU that it runs on
};

constexpr FamilyTraits traits_of(Family family) {
  if (family == Family::sm90) {
    return {.persistent = true,
            .packs_heads = true,
            .group_rows = kWarpgroupRows,
            .one_backward_kernel = true,
            .cuts_masked_rows = true,
            .knows_scores = true,
            .most_multiprocessors = 144};
  }
  return {.persistent = false,
          .packs_heads = false,
          .group_rows = 0,
          .one_backward_kernel = false,
          .cuts_masked_rows = false,
          .knows_scores = false,
          .most_multiprocessors = 192};
}

// Of the kernel that serves a call.
constexpr Scores scores_of(Family family, Masking masking, Scores asked) {
  return masking == Masking::table && !traits_of(family).knows_scores ? Scores::general : asked;
}

}  // namespace flash_cute
