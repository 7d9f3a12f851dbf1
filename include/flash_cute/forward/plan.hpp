// What a call of the forward runs: decided here, before anything is launched, from shapes, the mask and facts
// of the device. The launch executes it, explain prints it. This header knows no CUDA.
#pragma once

#include "flash_cute/attention/mask/mask_table.hpp"
#include "flash_cute/core/workspace.hpp"
#include "flash_cute/forward/choose_tile.hpp"
#include "flash_cute/forward/kernel.hpp"
#include "flash_cute/forward/partial.hpp"
#include "flash_cute/forward/split_plan.hpp"
#include "flash_cute/scheduler/tile_order.hpp"
#include "flash_cute/scheduler/varlen_order.hpp"

namespace flash_cute {

enum class ForwardRegion {
  list,          // of sequences, with its header, or the header alone
  tile_counter,  // where there is no header
  partial,       // results of splits
  totals,        // of splits that a tile has had, of each thread block
  mask_table,
};
using ForwardLayout = WorkspaceLayout<ForwardRegion, 5>;

struct ForwardPlan {
  ForwardKernel kernel;
  PackGqa rows;                     // of a tile
  int blocks = 0;                   // thread blocks of the grid
  bool prepared_by_kernel = false;  // where lengths vary, the device makes a list: by a kernel of its own?
  bool reads_codes = false;         // of 8 bits
  int section_tiles = 0;            // whose sections have about so many tiles, see VarlenOrder
  TileOrder order = {};             // of a uniform batch
  SplitPlan split = {};
  ForwardLayout workspace = {};

  bool splits() const { return kernel.keys == Keys::split; }
  SplitOrder split_order(ForwardParams const& params, WindowMask const& mask, void* memory) const {
    return SplitOrder::make(params, mask, rows, split.lengths, list(memory), prepared_by_kernel,
                            split.is_uniform);
  }
  VarlenListHeader* list(void* memory) const {
    return workspace.find<VarlenListHeader>(memory, ForwardRegion::list);
  }
  int* tile_counter(void* memory) const {
    VarlenListHeader* const header = list(memory);
    return header ? &header->tile_counter : workspace.find<int>(memory, ForwardRegion::tile_counter);
  }
  PartialResults partial(ForwardParams const& params, void* memory) const {
    return PartialResults::in(workspace.find<void>(memory, ForwardRegion::partial), split.slots, split.rows,
                              params.shape.head_dim_v, split.stores_tiles);
  }
  // Null where no tile has several splits.
  float* totals(void* memory) const { return workspace.find<float>(memory, ForwardRegion::totals); }
  MaskTable mask_table(ForwardParams const& params, void* memory) const {
    return MaskTable::make(params, workspace.find<void>(memory, ForwardRegion::mask_table),
                           rows.tile_queries(), kernel.tile.block_n, /*transposes=*/false);
  }
};

namespace plan {

template <class Record>
void add_list(ForwardPlan& plan, int64_t capacity) {
  plan.workspace.add<char>(ForwardRegion::list,
                           sizeof(VarlenListHeader) + capacity * int64_t(sizeof(Record)));
}

inline void add_mask_table(ForwardPlan& plan, ForwardParams const& params) {
  if (params.masking() == Masking::window) return;
  plan.workspace.add<char>(ForwardRegion::mask_table,
                           MaskTable::bytes(params, plan.rows.tile_queries(), plan.kernel.tile.block_n,
                                            /*transposes=*/false),
                           kRegionAlignment);
}

// bucket: the head dims of the kernels.
inline ForwardPlan plan_split(Family family, ForwardTiles const& tiles, HeadDims bucket,
                              ForwardParams const& params, WindowMask const& mask) {
  bool const persistent = traits_of(family).persistent;
  auto const [tile, rows] = choose_split_tile(family, tiles, params, of_equal_lengths(params, mask, 1).shape);
  ForwardPlan result{split_kernel(family, params.masking()).with(tile), rows};
  result.reads_codes = params.cache.is_fp8;
  SplitPlan& split = result.split;
  split.is_uniform = !params.lengths.given;
  int64_t const rows_of_head = int64_t(rows.heads.value) * params.shape.seqlen_q;
  split.rows = rows.groups * int(smaller<int64_t>(rows.used(), rows_of_head));
  split.lengths = split_lengths(family, result.kernel, params, split.rows);

  int64_t const packs_of_all =
      params.shape.heads_kv * rows.packs(params.shape.heads_q / params.shape.heads_kv);
  if (SplitOrder::list_capacity(params, rows, split.lengths) * packs_of_all > kMaxTiles)
    throw_too_many_tiles();
  SplitOrder const order = result.split_order(params, mask, nullptr);
  int const items = order.capacity * int(packs_of_all);
  bool const is_unsplit = split.is_uniform && order.uniform.splits == 1;
  split.slots = is_unsplit               ? 0
                : split.is_uniform       ? items
                : params.batch_invariant ? int(SplitOrder::slot_capacity(params, rows, split.lengths))
                                         : 2 * split.lengths.wanted_items();
  result.blocks = persistent ? smaller(items, split.lengths.blocks) : items;
  result.prepared_by_kernel =
      !split.is_uniform && (!persistent || params.shape.batch > SplitOrder::kFewSequences);
  split.stores_tiles = !split.is_uniform && !result.prepared_by_kernel;
  if (!split.is_uniform) add_list<SplitRecord>(result, result.prepared_by_kernel ? order.capacity : 0);
  if (split.is_uniform && persistent && (items > split.lengths.blocks || split.slots > 0))
    result.workspace.add<int>(ForwardRegion::tile_counter, 1);
  result.workspace.add<char>(
      ForwardRegion::partial,
      PartialResults::bytes(split.slots, split.rows, params.shape.head_dim_v, split.stores_tiles),
      kRegionAlignment);
  bool const may_fold = split.lengths.folds && split.lengths.most_fixed(params.shape.seqlen_k) > 1;
  if (may_fold && (is_unsplit || !split.is_uniform)) {
    result.workspace.add<char>(ForwardRegion::totals,
                               result.blocks * PartialResults::total_bytes(tile.block_m, bucket.v),
                               kRegionAlignment);
  }
  add_mask_table(result, params);
  return result;
}

inline ForwardPlan plan_whole(Family family, ForwardTiles const& tiles, ForwardParams const& params,
                              WindowMask const& mask) {
  bool const persistent = traits_of(family).persistent;
  int const multiprocessors = params.device.multiprocessors;
  auto const [tile, rows] = choose_tile(family, tiles, params, mask);
  // Kernels with a table ask a sequence for its lengths.
  bool const has_table = params.masking() == Masking::table;
  Seqlens const seqlens = params.lengths.given || has_table ? Seqlens::varlen : Seqlens::uniform;
  Scores const scores = scores_of(family, params.masking(), params.asked_scores());
  ForwardPlan result{whole_kernel(family, seqlens, params.masking(), scores).with(tile), rows};
  UniformBatch const batch{params.shape, mask, params.device, params.element_bytes};
  // Tiles that share K and V come in sections (see TileOrder, VarlenOrder): of two rounds of blocks; on sm90,
  // where tiles have equal lengths or a static scheduler, of one head of K and V.
  if (seqlens == Seqlens::varlen) {
    int64_t const m_blocks = m_block_capacity(params, rows);
    int64_t const tiles_of_all =
        m_blocks * params.shape.heads_kv * rows.packs(params.shape.heads_q / params.shape.heads_kv);
    if (tiles_of_all > kMaxTiles) throw_too_many_tiles();
    result.section_tiles = persistent && mask.is_even() ? 0 : 2 * multiprocessors;
    result.blocks = persistent ? smaller(int(tiles_of_all), multiprocessors) : int(tiles_of_all);
    result.prepared_by_kernel = !persistent || params.shape.batch > VarlenOrder::kFewSequences;
    if (result.prepared_by_kernel) {
      add_list<SequenceRecord>(result, m_blocks);
    } else if (tiles_of_all > result.blocks) {
      result.workspace.add<int>(ForwardRegion::tile_counter, 1);
    }
  } else if (persistent && is_dynamic(batch, rows)) {
    result.order = dynamic_order(batch, rows);
    result.blocks = multiprocessors;
    result.workspace.add<int>(ForwardRegion::tile_counter, 1);
  } else {
    if (persistent) result.kernel.tiles = Tiles::shared_out;
    result.order = TileOrder::make(params.shape, mask, rows, params.device.l2_bytes / params.element_bytes,
                                   persistent ? 0 : 2 * multiprocessors);
    result.blocks = persistent ? persistent_blocks(result.order, multiprocessors) : result.order.tiles();
  }
  add_mask_table(result, params);
  return result;
}

}  // namespace plan

// bucket, split_bucket: the head dims of the kernels that serve the problem, with all keys of a tile and with
// splits of them; 0 where there is none.
inline ForwardPlan plan_forward(Family family, HeadDims bucket, HeadDims split_bucket,
                                ForwardParams const& params, WindowMask const& mask) {
  ForwardTiles const split_tiles = forward_tiles(family, split_bucket, params.element_bytes);
  if (plan::splits(family, split_tiles, params, mask)) {
    return plan::plan_split(family, split_tiles, split_bucket, params, mask);
  }
  return plan::plan_whole(family, forward_tiles(family, bucket, params.element_bytes), params, mask);
}

}  // namespace flash_cute
