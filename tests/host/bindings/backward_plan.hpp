// Tiles, plans and workspaces of the backward.
#pragma once

#include <iterator>
#include <string>

#include "bindings/changes.hpp"
#include "bindings/core.hpp"
#include "bindings/sequences.hpp"
#include "flash_cute/backward/plan.hpp"
#include "flash_cute/backward/tiles.hpp"

namespace flash_cute::host {

inline BackwardParams backward_params(VarlenBatch const& batch) {
  BackwardParams params{};
  params.shape = batch.params.shape;
  params.lengths = batch.params.lengths;
  params.element_bytes = kBytes;
  return params;
}

// A plan, and what it is made from.
struct PlannedBackward : BackwardPlan {
  VarlenBatch const& batch;
  Family family;
  BackwardParams params;
};

// The plan's workspace where it is at kWorkspace in memory, and dQ at kDq.
constexpr uintptr_t kWorkspace = 1 << 20, kDq = uintptr_t(1) << 60;
inline BackwardWorkspace workspace_of(PlannedBackward const& plan) {
  BackwardParams params = plan.params;
  params.dq = {reinterpret_cast<void*>(kDq), 0, 0, params.shape.head_dim};
  return plan.parts(reinterpret_cast<void*>(kWorkspace), params);
}

// The regions of the workspace: name, first byte and bytes as the plan has them, and where kernels find it.
inline auto workspace_regions(PlannedBackward const& plan) {
  BackwardWorkspace const parts = workspace_of(plan);
  void const* const found[] = {parts.lse_delta.lse,
                               parts.lse_delta.neg_delta,
                               parts.lse_delta.terms.data,
                               parts.dq.accum,
                               parts.gqa.sums,
                               parts.tile_counter,
                               parts.dq.adds,
                               parts.dq.blocks_taken,
                               parts.dq.tiles_finished,
                               parts.varlen.is_uniform,
                               parts.varlen.kv_block_offsets,
                               parts.varlen.offsets_q,
                               parts.varlen.offsets_k,
                               parts.mask_table};
  static_assert(std::size(found) == kWorkspaceRegions);
  std::vector<std::tuple<std::string, int64_t, int64_t, int64_t>> regions;
  for (int i = 0; i < kWorkspaceRegions; ++i) {
    auto const [begin, bytes] = plan.workspace.regions[i];
    if (!found[i]) continue;
    regions.emplace_back(kWorkspaceRegionNames[i], begin, bytes,
                         int64_t(reinterpret_cast<uintptr_t>(found[i]) - kWorkspace));
  }
  return regions;
}

inline void bind_backward_plan(py::module_& module) {
  py::class_<BackwardTile>(module, "BackwardTile")
      .def_readonly("block_m", &BackwardTile::block_m)
      .def_readonly("block_n", &BackwardTile::block_n)
      .def_readonly("cluster", &BackwardTile::cluster)
      .def_readonly("lse_delta_mma", &BackwardTile::lse_delta_mma)
      .def_readonly("has_pair_tiles", &BackwardTile::has_pair_tiles)
      .def_property_readonly("has_two_roles", &BackwardTile::has_two_roles)
      .def("smem_bytes",
           [](BackwardTile const& tile, int head_dim) { return tile.smem_bytes(head_dim, kBytes); });
  module.def(
      "backward_tiles",
      [](Family family, HeadDims head_dims, bool has_table, bool changes_scores) {
        Masking const masking = has_table ? Masking::table : Masking::window;
        Scores const scores = changes_scores ? Scores::general : Scores::product;
        BackwardTiles const tiles = backward_tiles(family, head_dims, masking, scores, kBytes);
        return std::vector(tiles.keys, tiles.keys + tiles.count());
      },
      py::arg("family"), py::arg("head_dims"), py::arg("has_table") = false,
      py::arg("changes_scores") = false);

  using Plan = PlannedBackward const&;
  py::class_<PlannedBackward>(module, "BackwardPlan")
      .def_property_readonly("tile", [](Plan plan) { return plan.kernel.tile; })
      .def_property_readonly(
          "is_listed", [](Plan plan) { return is_listed(Pass::backward, plan.kernel, backward_kernels); })
      .def_property_readonly("has_table", [](Plan plan) { return plan.kernel.masking == Masking::table; })
      .def_property_readonly("changes_scores",
                             [](Plan plan) { return plan.kernel.scores == Scores::general; })
      .def_property_readonly("hides_pairs", [](Plan plan) { return plan.kernel.scores == Scores::hidden; })
      .def_readonly("runs_kv", &PlannedBackward::runs_kv)
      .def_property_readonly("runs_dq_alone",
                             [](Plan plan) { return plan.dq.method == DqMethod::separate_kernel; })
      .def_property_readonly("accumulates_dq", [](Plan plan) { return plan.dq.is_accumulated(); })
      .def_property_readonly("ordered", [](Plan plan) { return plan.dq.ordered; })
      .def_property_readonly("zero_fills_dq",
                             [](Plan plan) { return plan.dq.begin != DqBegin::first_tile_stores; })
      .def_property_readonly("converts_dq", [](Plan plan) { return plan.dq.is_converted; })
      .def_property_readonly("gqa_parts", [](Plan plan) { return plan.gqa.parts; })
      .def_readonly("lse_delta_in_dq", &PlannedBackward::lse_delta_in_dq)
      .def_property_readonly("section", [](Plan plan) { return plan.order.section.value; })
      .def_property_readonly("last_section", [](Plan plan) { return plan.order.last_section.value; })
      .def_readonly("rows", &PlannedBackward::rows)
      .def_readonly("tiles", &PlannedBackward::tiles)
      .def_readonly("blocks", &PlannedBackward::blocks)
      .def_readonly("preprocess_blocks", &PlannedBackward::preprocess_blocks)
      .def_readonly("kv_blocks", &PlannedBackward::kv_blocks)
      .def_readonly("q_blocks", &PlannedBackward::q_blocks)
      .def_property_readonly("workspace_bytes", [](Plan plan) { return plan.workspace.bytes; })
      .def_property_readonly(
          "zero_filled",
          [](Plan plan) { return std::pair(plan.workspace.zero_begin, plan.workspace.zero_bytes); })
      .def_property_readonly("regions", &workspace_regions)
      // Where terms of queries are: in dQ's memory? their first byte, and then elements from row to row and
      // how many lie side by side.
      .def_property_readonly("terms", [](Plan plan) {
        LseDeltaWorkspace const found = workspace_of(plan).lse_delta;
        auto const address = reinterpret_cast<uintptr_t>(found.terms.data);
        bool const in_dq = address >= kDq;
        return std::tuple(std::pair(in_dq, address - (in_dq ? kDq : kWorkspace)), found.terms.row_stride,
                          1 << found.log2_terms_of_row);
      });
  module.def(
      "plan_backward",
      [](Family family, HeadDims bucket, VarlenBatch const& batch, int smem_bytes, bool needs_dq,
         bool needs_dkv, bool deterministic, int multiprocessors, py::dict const& changes) {
        BackwardParams params = backward_params(batch);
        Changes(changes).apply(params);
        params.device = {
            .index = 0, .multiprocessors = multiprocessors, .smem_bytes = smem_bytes, .l2_bytes = 50 << 20};
        return PlannedBackward{
            plan_backward(family, bucket, params, batch.mask, needs_dq, needs_dkv, deterministic), batch,
            family, params};
      },
      py::keep_alive<0, 3>());
}

}  // namespace flash_cute::host
