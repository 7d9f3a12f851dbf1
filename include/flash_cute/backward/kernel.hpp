// A kernel that computes dK and dV, and mostly dQ, as a value: what is compiled into it, and the list of all;
// as forward/kernel.hpp.
#pragma once

#include "flash_cute/backward/tiles.hpp"
#include "flash_cute/core/family.hpp"
#include "flash_cute/core/kernel_list.hpp"

namespace flash_cute {

// Of the query heads that share keys, has a tile all, or a part (see GqaSums)? The code for parts costs the
// main loop of the Hopper family 1 to 2% (head dims 64 and 128, H200).
enum class TileHeads { all, part };
// Does the Ampere family's kernel add its part of dQ to an accumulator in the workspace? at_run_time: if it
// is given one, as the Hopper family's does.
enum class DqSums { none, all, at_run_time };

struct BackwardKernel {
  BackwardTile tile;
  Masking masking = Masking::window;
  Scores scores = Scores::product;
  TileHeads heads = TileHeads::all;
  DqSums dq_sums = DqSums::at_run_time;

  constexpr bool operator==(BackwardKernel const&) const = default;
};

// What a call takes: with sums of dQ or without, with groups of heads in parts or whole.
constexpr BackwardKernel backward_kernel(Family family, BackwardTile const& tile, Masking masking,
                                         Scores scores, bool sums_dq, bool has_parts) {
  bool const one_kernel = traits_of(family).one_backward_kernel,
             asks = one_kernel || !tile.dq_at_compile_time;
  return {.tile = tile,
          .masking = masking,
          .scores = scores,
          .heads = one_kernel && has_parts ? TileHeads::part : TileHeads::all,
          .dq_sums = asks      ? DqSums::at_run_time
                     : sums_dq ? DqSums::all
                               : DqSums::none};
}

// Of the kernel that serves a call: consumers in a cluster find out about pairs themselves, whatever is
// asked.
constexpr Scores backward_scores(Family family, HeadDims head_dims, Masking masking, Scores asked) {
  Scores const scores = scores_of(family, masking, asked);
  bool const has_pair_tiles = backward_tiles(family, head_dims, masking, scores).keys[0].has_pair_tiles;
  return scores == Scores::hidden && !has_pair_tiles ? Scores::general : scores;
}

// THE list: what a row of instances.def compiles for one element type.
constexpr auto backward_kernels(Family family, HeadDims head_dims, ElementType element, Variant variant) {
  KernelList<BackwardKernel, 8> list;
  Masking const masking = masking_of(variant);
  for (Scores const asked : {Scores::product, Scores::hidden, Scores::general}) {
    if (asked != Scores::product && masking == Masking::window) continue;
    Scores const scores = backward_scores(family, head_dims, masking, asked);
    BackwardTiles const tiles = backward_tiles(family, head_dims, masking, scores, element_bytes(element));
    for (BackwardTile const& tile : tiles.keys) {
      for (bool const yes : {false, true}) list.add(backward_kernel(family, tile, masking, scores, yes, yes));
    }
  }
  return list;
}

template <class Instance>
struct BackwardListOf {
  static constexpr auto kKernels =
      backward_kernels(Instance::family, Instance::head_dims, Instance::element, Instance::variant);
};

}  // namespace flash_cute
