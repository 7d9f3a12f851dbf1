// A kernel of the forward as a value: everything that is compiled into it, and the list of all kernels. The
// plan holds one, the launch finds it in the list, traits pick their parts by it.
#pragma once

#include "flash_cute/core/family.hpp"
#include "flash_cute/core/kernel_list.hpp"
#include "flash_cute/forward/tiles.hpp"

namespace flash_cute {

enum class Seqlens { uniform, varlen };  // all as the shape says, or as the device alone knows
enum class Keys { whole, split };        // has a tile all keys of its sequence, or a split of them?
enum class Loads { tiles, rows };        // K and V: tiles of neighbouring rows, or rows by their addresses
enum class Tiles { one, shared_out, taken };  // of a thread block: one, or several, known beforehand or not

struct ForwardKernel {
  ForwardTile tile;
  Seqlens seqlens = Seqlens::varlen;
  Keys keys = Keys::whole;
  Loads loads = Loads::tiles;
  Masking masking = Masking::window;
  Scores scores = Scores::product;
  Tiles tiles = Tiles::one;

  constexpr bool operator==(ForwardKernel const&) const = default;
  // Do tiles of a bias come by TMA? Where head dims leave no room, and elsewhere, each thread loads its own.
  constexpr bool takes_bias_tiles(Family family, HeadDims head_dims) const {
    return family == Family::sm90 && scores == Scores::general && keys == Keys::whole && head_dims.qk <= 128;
  }
  // Can a tile have several splits of a fixed length, which it adds up by itself? Where queries are few,
  // reading bounds it: there it would only get fewer thread blocks.
  constexpr bool folds_splits(Family family) const {
    return family == Family::sm90 && keys == Keys::split && tile.block_m > kWarpgroupRows;
  }

  constexpr ForwardKernel with(ForwardTile const& other) const {
    ForwardKernel kernel = *this;
    kernel.tile = other;
    return kernel;
  }
};

// Without a tile.
constexpr ForwardKernel whole_kernel(Family family, Seqlens seqlens, Masking masking,
                                     Scores scores = Scores::product) {
  return {.tile = {},
          .seqlens = seqlens,
          .masking = masking,
          .scores = scores,
          .tiles = traits_of(family).persistent ? Tiles::taken : Tiles::one};
}
constexpr ForwardKernel split_kernel(Family family, Masking masking) {
  return {.tile = {},
          .keys = Keys::split,
          .loads = Loads::rows,
          .masking = masking,
          .scores = masking == Masking::table ? Scores::general : Scores::product,
          .tiles = traits_of(family).persistent ? Tiles::taken : Tiles::one};
}

// THE list: what a row of instances.def compiles for one element type.
constexpr auto forward_kernels(Family family, HeadDims head_dims, ElementType element, Variant variant) {
  ForwardTiles const tiles = forward_tiles(family, head_dims, element_bytes(element));
  Masking const masking = masking_of(variant);
  KernelList<ForwardKernel, 6> list;
  if (variant == Variant::plain) {
    for (ForwardTile const& tile : {tiles.main, tiles.small}) {
      ForwardKernel uniform = whole_kernel(family, Seqlens::uniform, masking);
      list.add(uniform.with(tile));
      uniform.tiles = traits_of(family).persistent ? Tiles::shared_out : Tiles::one;
      list.add(uniform.with(tile));
      list.add(whole_kernel(family, Seqlens::varlen, masking).with(tile));
    }
    return list;
  }
  if (masking == Masking::table) {
    for (Scores const asked : {Scores::product, Scores::hidden, Scores::general}) {
      Scores const scores = scores_of(family, masking, asked);
      list.add(whole_kernel(family, Seqlens::varlen, masking, scores).with(tiles.for_table(scores)));
    }
  }
  list.add(split_kernel(family, masking).with(tiles.decode));
  list.add(split_kernel(family, masking).with(tiles.prefill_split));
  list.add(split_kernel(family, masking).with(tiles.codes));
  return list;
}

template <class Instance>
struct ForwardListOf {
  static constexpr auto kKernels =
      forward_kernels(Instance::family, Instance::head_dims, Instance::element, Instance::variant);
};

}  // namespace flash_cute
