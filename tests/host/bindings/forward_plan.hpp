// Tiles and plans of the forward.
#pragma once

#include "bindings/changes.hpp"
#include "bindings/core.hpp"
#include "bindings/sequences.hpp"
#include "flash_cute/forward/plan.hpp"
#include "flash_cute/forward/tiles.hpp"

namespace flash_cute::host {

inline void bind_forward_plan(py::module_& module) {
  module.attr("FEW_SEQUENCES") = VarlenOrder::kFewSequences;
  module.attr("FEW_CUT_SEQUENCES") = SplitOrder::kFewSequences;

  py::class_<ForwardTile>(module, "ForwardTile")
      .def_readonly("block_m", &ForwardTile::block_m)
      .def_readonly("block_n", &ForwardTile::block_n)
      .def_readonly("stages", &ForwardTile::stages)
      .def_readonly("stages_q", &ForwardTile::stages_q)
      .def_readonly("warps", &ForwardTile::warps);
  module.def(
      "forward_tiles",
      [](Family family, HeadDims head_dims, int element_bytes) {
        ForwardTiles const tiles = forward_tiles(family, head_dims, element_bytes);
        return std::tuple(tiles.main, tiles.small, tiles.decode, tiles.prefill_split);
      },
      py::arg("family"), py::arg("head_dims"), py::arg("element_bytes") = 2);
  module.def("is_general", [](py::dict const& changes) {
    ForwardParams params{};
    Changes(changes).apply(params);
    return params.masking() == Masking::table;
  });

  using Plan = ForwardPlan const&;
  py::class_<ForwardPlan>(module, "ForwardPlan")
      .def_property_readonly("tile", [](Plan plan) { return plan.kernel.tile; })
      .def_property_readonly("is_listed",  // is its kernel one of those that its instance compiles?
                             [](Plan plan) { return is_listed(Pass::forward, plan.kernel, forward_kernels); })
      .def_property_readonly("has_table", [](Plan plan) { return plan.kernel.masking == Masking::table; })
      .def_property_readonly("changes_scores",
                             [](Plan plan) { return plan.kernel.scores == Scores::general; })
      .def_property_readonly("hides_pairs", [](Plan plan) { return plan.kernel.scores == Scores::hidden; })
      .def_readonly("blocks", &ForwardPlan::blocks)
      .def_readonly("prepared_by_kernel", &ForwardPlan::prepared_by_kernel)
      .def_property_readonly("dynamic",
                             [](Plan plan) {
                               return plan.kernel.seqlens == Seqlens::uniform &&
                                      plan.kernel.tiles == Tiles::taken;
                             })
      .def_readonly("order", &ForwardPlan::order)
      .def_property_readonly("splits", &ForwardPlan::splits)
      .def_property_readonly(
          "partial_offset",
          [](Plan plan) { return plan.workspace.regions[int(ForwardRegion::partial)].begin; })
      .def_property_readonly("slots", [](Plan plan) { return plan.split.slots; })
      .def_property_readonly("folds", [](Plan plan) { return plan.split.lengths.folds; })
      .def_property_readonly(
          "totals_bytes", [](Plan plan) { return plan.workspace.regions[int(ForwardRegion::totals)].bytes; })
      .def_property_readonly("workspace_bytes", [](Plan plan) { return plan.workspace.bytes; })
      .def_property_readonly("regions",  // of the workspace: first byte and bytes
                             [](Plan plan) {
                               std::vector<std::pair<int64_t, int64_t>> regions;
                               for (auto const& region : plan.workspace.regions)
                                 if (region.bytes > 0) regions.emplace_back(region.begin, region.bytes);
                               return regions;
                             })
      .def_property_readonly("packed_heads", [](Plan plan) { return plan.rows.heads.value; })
      .def_property_readonly("tile_queries", [](Plan plan) { return plan.rows.tile_queries(); });
  module.def("plan_forward", [](Family family, HeadDims bucket, VarlenBatch const& batch, int multiprocessors,
                                int64_t l2_bytes, py::dict const& changes) {
    ForwardParams params = batch.params;
    Changes const given(changes);
    given.apply(params);
    params.batch_invariant = given.batch_invariant;
    params.cache.given |= given.is_fp8;
    params.cache.is_fp8 = given.is_fp8;
    params.device = {.index = 0, .multiprocessors = multiprocessors, .smem_bytes = 0, .l2_bytes = l2_bytes};
    int split_bucket = larger(bucket.qk, bucket.v);  // of the smallest that holds this one
    while (split_bucket <= 256 && forward_tiles(family, both(split_bucket)).decode.warps == 0)
      split_bucket += 8;
    return plan_forward(family, bucket, both(split_bucket), params, batch.mask);
  });
}

}  // namespace flash_cute::host
