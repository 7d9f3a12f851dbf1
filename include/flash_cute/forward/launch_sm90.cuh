// Launches the Hopper family's forward.
#pragma once

#include "flash_cute/forward/kernel_sm90.hpp"
#include "flash_cute/forward/launch.hpp"
#include "flash_cute/forward/launch_kernel.cuh"
#include "flash_cute/forward/launch_ragged.cuh"

namespace flash_cute {

inline PackedRows rows_sm90(ForwardTile tile, int packed) {
  return PackedRows(kWarpgroupRows, tile.block_m / kWarpgroupRows, packed);
}

// What a multiprocessor has to do with these tiles: the pairs of queries and keys that a tile covers, visible
// or not, times the rounds of tiles.
inline int64_t work(ForwardParams const& params, ForwardTile tile, int packed) {
  constexpr int kSamples = 16;  // tiles that are looked at
  ProblemShape const& shape = params.shape;
  int const queries = rows_sm90(tile, packed).tile_queries();
  int const m_blocks = ceil_div(shape.seqlen_q, queries), step = ceil_div(2 * m_blocks, kSamples);
  int64_t blocks = 0, samples = 0;
  for (int from_end = 0; from_end < m_blocks; from_end += step) {
    for (int m_block : {from_end, m_blocks - 1 - from_end}) {  // their mean is the mean of all
      BlockRange const visited = params.mask.visited(m_block * queries, queries, tile.block_n);
      blocks += larger(1, visited.end - visited.begin);  // see visited_blocks
      ++samples;
    }
  }
  int const packs = ceil_div(shape.heads_q / shape.heads_kv, packed);
  int64_t const tiles = int64_t(m_blocks) * packs * shape.heads_kv * shape.batch;
  int64_t const rounds = ceil_div(tiles, int64_t(params.device.multiprocessors));
  return rounds * blocks * tile.block_m * tile.block_n / samples;
}

// Packing pays with fewer queries than a tile has rows: it leaves fewer tiles, and K and V are read less
// often. A group of more heads than a warpgroup has rows is packed in equal parts.
inline int packed_heads(ProblemShape const& shape, ForwardTile tile) {
  int const group = shape.heads_q / shape.heads_kv, packs = ceil_div(group, kWarpgroupRows);
  int const packed = ceil_div(group, packs);
  if (shape.seqlen_q >= tile.block_m) return 1;
  return packs * ceil_div(shape.seqlen_q, rows_sm90(tile, packed).tile_queries()) < group ? packed : 1;
}

// One block an SM goes through many tiles, loading ahead. The tiles take whole rounds of all blocks, so no
// block more than these need is started. Long tiles of unequal length that don't share out evenly are better
// handed out one by one, as SMs become free: there the start of a block matters less than who is left with
// the last long tile. Behind a narrow window the few short tiles of a section's heads come last in it and
// even out what full rounds of long ones leave (docs/forward_sm90_experiments.md has the sweep).
inline int persistent_blocks(ForwardParams const& params, TileOrder const& order, int block_n) {
  constexpr int kLongTile = 64;  // blocks of keys
  if (order.few_keys) return smaller(order.tiles(), params.device.multiprocessors);
  int const rounds = ceil_div(order.tiles(), params.device.multiprocessors);
  int const blocks = ceil_div(order.tiles(), rounds);
  auto length = [&](int m_block) {
    int const queries = order.rows.tile_queries();
    BlockRange const visited = params.mask.visited(m_block * queries, queries, block_n);
    return visited.end - visited.begin;
  };
  int const first = length(0), last = length(order.m_blocks - 1);
  bool const even = first == last || blocks % order.m_blocks == 0 || order.m_blocks % blocks == 0;
  return even || larger(first, last) < kLongTile ? blocks : order.tiles();
}

// Calls visitor(traits, packed heads) for the tile that serves the problem.
template <class Instance, class Visitor>
auto visit_tile(ForwardParams const& params, Visitor&& visitor) {
  constexpr ForwardTiles kTiles = forward_tiles(Instance::family, Instance::head_dim);
  int const packed = packed_heads(params.shape, kTiles.main);
  if constexpr (kTiles.small.warps > 0) {
    int const packed_small = packed_heads(params.shape, kTiles.small);
    if (work(params, kTiles.small, packed_small) < kTiles.enough * work(params, kTiles.main, packed)) {
      return visitor(ForwardTraitsSm90<Instance, kTiles.small>{}, packed_small);
    }
  }
  return visitor(ForwardTraitsSm90<Instance, kTiles.main>{}, packed);
}

// The maps of q, k, v and out, by encode(view, rows, rows from entry to entry, heads, box).
template <class Traits, class Encode>
ForwardMaps encode_maps(ForwardParams const& params, PackedRows const& rows, RaggedEntries const& entries,
                        Encode&& encode) {
  ProblemShape const& shape = params.shape;
  TmaBox const box_q{Traits::kPanel, int(rows.packed.value), rows.queries},
      box_kv{Traits::kPanel, 1, Traits::kBlockN};
  return {.q = encode(params.q, shape.seqlen_q, entries.q, shape.heads_q, box_q),
          .k = encode(params.k, shape.seqlen_k, entries.k, shape.heads_kv, box_kv),
          .v = encode(params.v, shape.seqlen_k, entries.v, shape.heads_kv, box_kv),
          .out = encode(params.out, shape.seqlen_q, entries.out, shape.heads_q, box_q)};
}

template <class Traits>
ForwardMaps maps_of(ForwardParams const& params, TileOrder const& order) {
  ProblemShape const& shape = params.shape;
  return encode_maps<Traits>(
      params, order.rows, {}, [&](TensorView const& view, int rows, int, int heads, TmaBox box) {
        return make_tensor_map<typename Traits::Element, 4>(
            params.device.index, view.data,
            {uint64_t(shape.head_dim), uint64_t(heads), uint64_t(rows), uint64_t(shape.batch)},
            {view.head_stride, view.row_stride, view.batch_stride}, box);
      });
}

// See RaggedPlace.
template <class Traits>
ForwardMaps maps_of(ForwardParams const& params, RaggedOrder const& order) {
  using Element = typename Traits::Element;
  ProblemShape const& shape = params.shape;
  return encode_maps<Traits>(
      params, order.rows, order.entries,
      [&](TensorView const& view, int rows, int entry, int heads, TmaBox box) {
        uint64_t const planes = uint64_t(shape.batch - 1) * entry + rows + 1;
        int64_t const back = RaggedPlace::kWrap / int64_t(sizeof(Element)) - view.row_stride;
        return make_tensor_map<Element, 5>(
            params.device.index, view.data,
            {uint64_t(shape.head_dim), uint64_t(heads), RaggedPlace::kBound, planes, RaggedPlace::kBound + 1},
            {view.head_stride, view.row_stride, view.row_stride, back}, box);
      });
}

inline int ragged_blocks(ForwardParams const& params, RaggedOrder const& order) {
  return smaller(most_tiles(params, order), params.device.multiprocessors);
}

template <class Instance>
void ForwardLaunch<Instance>::run(ForwardParams const& params, cudaStream_t stream) {
  auto launch = [&]<class Traits, class Order>(Traits, Order const& order, int blocks,
                                               ForwardMaps const& maps) {
    launch_kernel<forward_kernel_sm90<Traits, Order>, /*kStartsEarly=*/true>(
        params.device, blocks, Traits::kThreads, sizeof(typename Traits::SharedStorage), stream, params,
        order, maps);
  };
  if (params.lengths.given) {
    visit_tile<Instance>(of_mean_length(params), [&]<class Traits>(Traits traits, int packed) {
      RaggedOrder const order = ragged_order(params, rows_sm90(Traits::kTile, packed));
      launch_prepare</*kStartsEarly=*/true>(params, order, stream);
      launch(traits, order, ragged_blocks(params, order), maps_of<Traits>(params, order));
    });
  } else {
    visit_tile<Instance>(params, [&]<class Traits>(Traits traits, int packed) {
      TileOrder const order = forward_order<Traits>(params, rows_sm90(Traits::kTile, packed));
      launch(traits, order, persistent_blocks(params, order, Traits::kBlockN),
             maps_of<Traits>(params, order));
    });
  }
}

template <class Instance>
int64_t ForwardLaunch<Instance>::workspace_bytes(ForwardParams const& params) {
  if (!params.lengths.given) return 0;
  return visit_tile<Instance>(of_mean_length(params), [&]<class Traits>(Traits, int packed) {
    return list_bytes(params, ragged_order(params, rows_sm90(Traits::kTile, packed)));
  });
}

template <class Instance>
LaunchPlan ForwardLaunch<Instance>::plan(ForwardParams const& params) {
  auto describe = [&]<class Traits>(Traits, int packed) {
    LaunchPlan plan{.tile = Traits::kTile,
                    .packed_heads = packed,
                    .threads = Traits::kThreads,
                    .smem_bytes = sizeof(typename Traits::SharedStorage),
                    .workspace_bytes = workspace_bytes(params)};
    PackedRows const rows = rows_sm90(Traits::kTile, packed);
    if (params.lengths.given) {
      RaggedOrder const order = ragged_order(params, rows);
      plan.grid = ragged_blocks(params, order);
      read_attributes(forward_kernel_sm90<Traits, RaggedOrder>, plan);
    } else {
      plan.grid = persistent_blocks(params, forward_order<Traits>(params, rows), Traits::kBlockN);
      read_attributes(forward_kernel_sm90<Traits, TileOrder>, plan);
    }
    return plan;
  };
  return visit_tile<Instance>(params.lengths.given ? of_mean_length(params) : params, describe);
}

template <class Instance>
std::vector<CompiledTile> ForwardLaunch<Instance>::tiles() {
  std::vector<CompiledTile> list;
  auto add = [&]<ForwardTile tile>() {
    if constexpr (tile.warps > 0) {
      list.push_back({tile, sizeof(typename ForwardTraitsSm90<Instance, tile>::SharedStorage)});
    }
  };
  constexpr ForwardTiles kTiles = forward_tiles(Instance::family, Instance::head_dim);
  add.template operator()<kTiles.main>();
  add.template operator()<kTiles.small>();
  return list;
}

}  // namespace flash_cute
