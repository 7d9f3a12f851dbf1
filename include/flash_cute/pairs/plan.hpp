// What a call runs that stores a value of each pair: decided from shapes and facts of the device. No CUDA.
#pragma once

#include "flash_cute/attention/batch_blocks.hpp"
#include "flash_cute/attention/mask/mask_table.hpp"
#include "flash_cute/core/family.hpp"
#include "flash_cute/core/workspace.hpp"
#include "flash_cute/pairs/params.hpp"

namespace flash_cute {

// A thread block owns tiles of values. Q and K, then dO and V, pass by it in slices of 128 bytes a row,
// `stages` of them at a time.
struct PairTile {
  static constexpr int kBlockM = 128, kSliceBytes = 128;
  int block_n;
  int stages;

  constexpr int stage_bytes() const { return (kBlockM + block_n) * kSliceBytes; }
};

// On Ampere, groups of eight warps that have 64 keys each: products of float32 take the registers of two.
constexpr int kPairGroupKeys = 64;
constexpr int pair_groups(int element_bytes) { return element_bytes == 2 ? 2 : 1; }
constexpr int pair_block_n(Family family, int element_bytes) {
  return family == Family::sm90 ? 128 : kPairGroupKeys * pair_groups(element_bytes);
}

enum class PairRegion { lse, neg_delta, mask_table, parts };

struct PairPlan {
  PairTile tile;
  int m_blocks, n_blocks;  // of values, of an entry and head
  int64_t steps;           // blocks of pairs that are added up to a tile of values; at most kMaxTiles, too
  int parts;               // of the steps: a tile of a part is a thread block's
  int blocks;              // thread blocks of the grid
  int q_blocks;            // of a head, whose LSE and delta a kernel before finds
  WorkspaceLayout<PairRegion, 4> workspace;

  // At most kMaxTiles where a call is launched.
  FLASH_CUTE_HOST_DEVICE int64_t tiles(PairShape const& shape) const {
    return int64_t(shape.entries) * shape.heads * m_blocks * n_blocks * parts;
  }

  // fixed_bytes: of shared memory, beside the stages, of which there are at most so many.
  static PairPlan make(Family family, PairParams const& params, int most_stages, int fixed_bytes) {
    ProblemShape const& of = params.call.shape;
    PairShape const& shape = params.shape;
    DeviceInfo const& device = params.call.device;
    PairPlan plan{};
    plan.tile = {.block_n = pair_block_n(family, params.call.element_bytes), .stages = most_stages};
    while (plan.tile.stages > 2 &&
           fixed_bytes + plan.tile.stages * plan.tile.stage_bytes() > device.smem_bytes)
      --plan.tile.stages;
    int const block_m = PairTile::kBlockM, block_n = plan.tile.block_n;
    plan.m_blocks = ceil_div(shape.rows, block_m);
    plan.n_blocks = ceil_div(shape.columns, block_n);
    plan.steps = int64_t(of.batch / shape.entries) * (shape.heads == 1 ? of.heads_q : 1) *
                 (shape.rows == 1 ? ceil_div(of.seqlen_q, block_m) : 1) *
                 (shape.columns == 1 ? ceil_div(of.seqlen_k, block_n) : 1);
    plan.parts = 1;
    // Two rounds of thread blocks, but no parts of less than a few steps.
    constexpr int kFewSteps = 4;
    int64_t const wanted = 2 * int64_t(device.multiprocessors), tiles = plan.tiles(shape);
    if (tiles < wanted)
      plan.parts = int(larger<int64_t>(1, smaller<int64_t>(wanted / tiles, plan.steps / kFewSteps)));
    int64_t const most_blocks = traits_of(family).persistent ? device.multiprocessors : kMaxTiles;
    plan.blocks = int(smaller(plan.tiles(shape), most_blocks));
    plan.q_blocks = BatchBlocks{nullptr, of.seqlen_q, of.batch, block_m}.count();
    auto& workspace = plan.workspace;
    for (PairRegion const region : {PairRegion::lse, PairRegion::neg_delta})
      workspace.add<float>(region, int64_t(of.heads_q) * plan.q_blocks * block_m, kRegionAlignment);
    workspace.add<char>(PairRegion::mask_table,
                        MaskTable::bytes(params.call, block_m, block_n, /*transposes=*/false),
                        kRegionAlignment);
    if (plan.parts > 1) workspace.add<float>(PairRegion::parts, plan.parts * shape.count(), kRegionAlignment);
    return plan;
  }

  // With where kernels find what they share.
  PairParams placed(PairParams params, void* memory) const {
    BackwardWorkspace& shared = params.call.workspace;
    shared.lse_delta.lse = workspace.find<float>(memory, PairRegion::lse);
    shared.lse_delta.neg_delta = workspace.find<float>(memory, PairRegion::neg_delta);
    shared.mask_table = workspace.find<char>(memory, PairRegion::mask_table);
    params.parts = workspace.find<float>(memory, PairRegion::parts);
    if (params.call.scores.bias.given) {
      params.call.scores.lowest = {static_cast<int*>(shared.mask_table), params.call.lse,
                                   params.call.lse_batch_stride, params.call.shape.seqlen_q};
    }
    return params;
  }

  static constexpr int64_t kMaxTiles = int64_t(1) << 30;
};

}  // namespace flash_cute
