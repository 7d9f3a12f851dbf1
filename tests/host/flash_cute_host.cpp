// The device-independent C++ as a Python module, for the tests beside it.
#define FLASH_CUTE_WITH_CUDA  // the dispatcher reads compiled.def, here the one beside this file

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "flash_cute/attention/mask/ranges.hpp"
#include "flash_cute/attention/mask/window.hpp"
#include "flash_cute/attention/sequence.hpp"
#include "flash_cute/backward/plan.hpp"
#include "flash_cute/backward/tile_scheduler.hpp"
#include "flash_cute/core/dispatch.hpp"
#include "flash_cute/forward/plan.hpp"
#include "flash_cute/forward/tiles.hpp"
#include "flash_cute/params.hpp"
#include "flash_cute/scheduler/split_order.hpp"
#include "flash_cute/scheduler/static_scheduler.hpp"
#include "flash_cute/scheduler/tile_order.hpp"
#include "flash_cute/scheduler/varlen_order.hpp"
#include "flash_cute/softmax/plan.hpp"

namespace py = pybind11;
using namespace flash_cute;

// Every offset is a sum of products with one of these: 64 bits wide, or tensors over 2^31 elements break.
static_assert(std::is_same_v<decltype(TensorView::batch_stride), int64_t>);
static_assert(std::is_same_v<decltype(TensorView::head_stride), int64_t>);
static_assert(std::is_same_v<decltype(TensorView::row_stride), int64_t>);

namespace {

std::pair<int, int> as_pair(BlockRange range) { return {range.begin, range.end}; }

// Every third block that is visited is full.
std::vector<BlockBits> block_bits_of(std::vector<uint32_t> const& visited) {
  std::vector<BlockBits> bits;
  for (uint32_t word : visited) {
    uint32_t full = 0;
    for (int i = 0; i < BlockBits::kBlocks; ++i) {
      bool const is_third = (bits.size() * BlockBits::kBlocks + i) % 3 == 0;
      full |= uint32_t(is_third) << i;
    }
    bits.push_back({word, word & full});
  }
  return bits;
}

constexpr int kBytes = element_bytes(ElementType::bf16);

using Sizes = std::tuple<int, int, int, int, int, int>;

ProblemShape shape_of(Sizes sizes) {
  auto const [batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim] = sizes;
  return {batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim};
}

// (query, head) of a row of a group, counted from the tile's first; none where the row is unused.
template <class Order>
std::optional<std::pair<int, int>> row_of(Order const& order, int group, int row) {
  if (!order.rows.uses(row)) return std::nullopt;
  return std::pair(group * order.rows.queries + order.rows.query(row), order.rows.head(row));
}

// The tiles of a block.
std::vector<std::tuple<int, int, int>> stream_of(TileOrder const& order, int block, int blocks) {
  std::vector<std::tuple<int, int, int>> list;
  UniformProblem<WindowMask> const problem{order, {}, {}};
  StaticTiles<UniformProblem<WindowMask>> tiles{problem, block, blocks};
  int left = tiles.count();
  if (left == 0) return list;
  for (TileCoord tile = tiles.first();;) {
    list.emplace_back(tile.m_begin, tile.head, tile.batch);
    TileCoord const upcoming = tiles.next();
    if (tiles.done(left)) return list;
    tile = tiles.get(upcoming);
  }
}

// Params with tensors of lengths, which here are on the host.
struct VarlenBatch {
  using Lengths = std::array<std::optional<std::vector<int>>, 5>;  // in the order of LengthParams
  Lengths lengths;
  WindowMask mask;
  ForwardParams params{};

  VarlenBatch(Sizes sizes, WindowMask const& mask_, Lengths lengths_)
      : lengths(std::move(lengths_)), mask(mask_) {
    params.element_bytes = kBytes;
    auto pointer = [&](int index) { return lengths[index] ? lengths[index]->data() : nullptr; };
    params.shape = shape_of(sizes);
    params.lengths = {.cu_seqlens_q = pointer(0),
                      .cu_seqlens_k = pointer(1),
                      .seqused_q = pointer(2),
                      .seqused_k = pointer(3),
                      .leftpad_k = pointer(4),
                      .given = lengths != Lengths{}};
    params.lse_batch_stride = lengths[0] ? 0 : int64_t(params.shape.heads_q) * params.shape.seqlen_q;
  }
  VarlenBatch(VarlenBatch const&) = delete;
};

// A list of sequences as scheduler/varlen_prepare.cuh writes it, and the problem over it.
struct VarlenTiles {
  VarlenBatch const& batch;
  std::vector<std::byte> list;
  VarlenProblem<WindowMask> problem;

  // entries: rows from one entry of q, k, v and out to the next. listed: the sequences, in their order.
  VarlenTiles(VarlenBatch const& batch_, int block_m, int groups, int packed, int section_tiles,
              std::array<int, 4> entries, std::vector<int> const& listed)
      : batch(batch_),
        problem{VarlenOrder::make(batch_.params, PackedRows(block_m / groups, groups, packed), section_tiles,
                                  false, batch_.mask.is_longest_last()),
                batch_.mask,
                {{entries[0], entries[1], entries[2], entries[3]}}} {
    VarlenOrder& order = problem.order;
    std::vector<SequenceRecord> records;
    for (int const b : listed) {
      Sequence const found = sequence(batch.params.shape, batch.params.lengths, batch.mask, b);
      SequenceRecord const record = order.record(b, found, int(records.size()));
      records.insert(records.end(), record.m_blocks, record);
    }
    list.resize(sizeof(VarlenListHeader) + records.size() * sizeof(SequenceRecord));
    order.header = new (list.data()) VarlenListHeader{.m_blocks = int(records.size()), .tile_counter = 0};
    std::ranges::copy(records, reinterpret_cast<SequenceRecord*>(order.header + 1));
  }
  VarlenTiles(VarlenTiles const&) = delete;

  template <TmaOperand operand>
  std::pair<int, int> coord(int index) const {
    VarlenCoord const found = problem.operands.coord<operand>(problem.tile(index));
    return {found.shift, found.plane};
  }
};

// The rows of instances.def: pass, family, head dim, variant.
std::vector<std::tuple<Pass, Family, int, Variant>> instances() {
  return {
#define FLASH_CUTE_INSTANCE(pass, family, head_dim, variant, ...) \
  {Pass::pass, Family::family, head_dim, Variant::variant},
#include "flash_cute/instances.def"
  };
}

}  // namespace

PYBIND11_MODULE(flash_cute_host, module) {
  module.attr("FEW_SEQUENCES") = VarlenOrder::kFewSequences;
  module.attr("FEW_CUT_SEQUENCES") = SplitOrder::kFewSequences;
  module.attr("MAP_BOUND") = VarlenCoord::kBound;
  module.attr("MAP_WRAP") = VarlenCoord::kWrap;
  py::enum_<Pass>(module, "Pass").value("forward", Pass::forward).value("backward", Pass::backward);
  py::enum_<Variant>(module, "Variant").value("plain", Variant::plain);
  py::enum_<Family>(module, "Family").value("sm80", Family::sm80).value("sm90", Family::sm90);
  py::enum_<ElementType>(module, "ElementType")
      .value("fp16", ElementType::fp16)
      .value("bf16", ElementType::bf16)
      .value("fp32", ElementType::fp32)
      .value("tf32", ElementType::tf32);

  module.def("bits_between", [](int begin, int end) { return bits_between(begin, end); });
  module.def("cut_ranges",
             [](std::vector<std::pair<int, int>> const& given, int shift, WindowMask const& mask, int row) {
               std::vector<int> flat;
               for (auto [begin, end] : given) flat.insert(flat.end(), {begin, end});
               CutRanges const cut(flat.data(), int(given.size()), shift, mask, row);
               std::vector<std::pair<int, int>> list;
               for (KeyRange const& range : cut.ranges) list.emplace_back(range.begin, range.end);
               return list;
             });
  auto steps_of = [](RangeKvBlocks blocks) {
    std::vector<std::tuple<int, int, int, bool>> steps;
    for (; !blocks.done(); blocks.advance())
      steps.emplace_back(blocks.block, blocks.next(), blocks.left(), blocks.is_full(WalkKnows{}));
    return steps;
  };
  module.def("walk_over_keys", [=](std::vector<uint32_t> const& visited, int count) {
    auto const bits = block_bits_of(visited);
    return steps_of({bits.data(), int(bits.size()), count});
  });
  module.def("walk_over_part", [=](std::vector<uint32_t> const& visited, int begin, int end) {
    auto const bits = block_bits_of(visited);
    return steps_of({bits.data(), BlockRange{begin, end}});
  });
  module.def("walk_over_queries", [](std::vector<uint32_t> const& visited, int blocks, int heads) {
    auto const bits = block_bits_of(visited);
    std::vector<std::tuple<int, int, bool>> steps;
    RangeQBlockIterator walk({bits.data(), blocks}, KvTile{}, heads);
    for (; walk.left > 0; walk.advance())
      steps.emplace_back(walk.head, walk.block, walk.is_full(WalkKnows{}));
    return steps;
  });

  py::class_<WindowMask>(module, "WindowMask")
      .def(py::init(&WindowMask::make))
      .def_readonly("seqlen_q", &WindowMask::seqlen_q)
      .def_readonly("seqlen_k", &WindowMask::seqlen_k)
      .def_readonly("left", &WindowMask::left)
      .def_readonly("right", &WindowMask::right)
      .def("visible", &WindowMask::visible)
      .def("visited", [](WindowMask const& mask, int m_begin, int block_m,
                         int block_n) { return as_pair(mask.visited(m_begin, block_m, block_n)); })
      .def("unmasked", [](WindowMask const& mask, int m_begin, int block_m,
                          int block_n) { return as_pair(mask.unmasked(m_begin, block_m, block_n)); })
      .def("transposed", &WindowMask::transposed)
      .def("from_key", &WindowMask::from_key)
      .def("first_row", &WindowMask::first_row)
      .def("end_row", &WindowMask::end_row)
      .def("visited_rows", [](WindowMask const& mask, int n_begin, int block_n,
                              int block_m) { return as_pair(mask.visited_rows(n_begin, block_n, block_m)); })
      .def("unmasked_rows",
           [](WindowMask const& mask, int n_begin, int block_n, int block_m) {
             return as_pair(mask.unmasked_rows(n_begin, block_n, block_m));
           })
      .def("first_reachable_key", &WindowMask::first_reachable_key)
      .def("fully_masked_rows", &WindowMask::fully_masked_rows)
      .def("visible_pairs", &WindowMask::visible_pairs);

  py::class_<TileOrder>(module, "TileOrder")
      .def(py::init([](Sizes sizes, WindowMask const& mask, int block_m, int groups, int packed,
                       int64_t l2_bytes, int wanted_tiles) {
        PackedRows const rows(block_m / groups, groups, packed);
        return TileOrder::make(shape_of(sizes), mask, rows, l2_bytes / kBytes, wanted_tiles);
      }))
      .def("tiles", &TileOrder::tiles)
      .def_property_readonly("section", [](TileOrder const& order) { return order.section.value; })
      .def("__call__",
           [](TileOrder const& order, int index) {
             TileCoord const tile = order(index);
             return std::tuple(tile.m_begin, tile.head, tile.head_kv, tile.batch);
           })
      .def("row", &row_of<TileOrder>)
      .def("stream", &stream_of);

  py::class_<VarlenBatch>(module, "VarlenBatch")
      .def(py::init<Sizes, WindowMask const&, VarlenBatch::Lengths>())
      .def("sequence",  // its rows, how many count, its first key, and what its mask knows
           [](VarlenBatch const& batch, int index) {
             Sequence const found = sequence(batch.params.shape, batch.params.lengths, batch.mask, index);
             return std::tuple(found.queries.begin, found.queries.end, found.used, found.k_begin, found.mask);
           })
      .def("unwritten",  // (entry, first row, end) of a part of what tiles leave out
           [](VarlenBatch const& batch, int part, int parts) {
             std::vector<std::tuple<int, int, int>> found;
             for_each_unwritten(batch.params, part, parts, [&](int entry, Rows const& rows) {
               found.emplace_back(entry, rows.begin, rows.end);
             });
             return found;
           })
      .def("m_block_capacity", [](VarlenBatch const& batch, int block_m, int groups, int packed) {
        return m_block_capacity(batch.params, PackedRows(block_m / groups, groups, packed));
      });

  py::class_<VarlenTiles>(module, "VarlenTiles")
      .def(py::init<VarlenBatch const&, int, int, int, int, std::array<int, 4>, std::vector<int>>(),
           py::keep_alive<1, 2>())
      .def("tiles", [](VarlenTiles const& tiles) { return tiles.problem.order.tiles(); })
      .def("__call__",
           [](VarlenTiles const& tiles, int index) {
             VarlenTile const tile = tiles.problem.tile(index);
             return std::tuple(tile.m_begin, tile.head, tile.head_kv, tile.batch);
           })
      .def("mask",
           [](VarlenTiles const& tiles, int index) { return tiles.problem.mask(tiles.problem.tile(index)); })
      .def("begins",  // the first query and key of its sequence
           [](VarlenTiles const& tiles, int index) {
             VarlenTile const tile = tiles.problem.tile(index);
             VarlenRows const& operands = tiles.problem.operands;
             return std::pair(operands.query(tile, 0).row, operands.key(tile, 0).row);
           })
      .def("lse_offset",
           [](VarlenTiles const& tiles, int index) {
             return tiles.problem.lse_offset(tiles.batch.params, tiles.problem.tile(index));
           })
      .def("coord_q", &VarlenTiles::coord<TmaOperand::q>)
      .def("coord_k", &VarlenTiles::coord<TmaOperand::k>)
      .def("coord_v", &VarlenTiles::coord<TmaOperand::v>)
      .def("coord_out", &VarlenTiles::coord<TmaOperand::out>)
      .def("row", [](VarlenTiles const& tiles, int group, int row) {
        return row_of(tiles.problem.order, group, row);
      });

  py::class_<BatchBlocks>(module, "BatchBlocks")
      .def(py::init([](VarlenBatch const& batch, bool of_queries, int block) {
             auto const& [params, lengths] = std::tie(batch.params, batch.params.lengths);
             return of_queries
                        ? BatchBlocks{lengths.cu_seqlens_q, params.shape.seqlen_q, params.shape.batch, block}
                        : BatchBlocks{lengths.cu_seqlens_k, params.shape.seqlen_k, params.shape.batch, block};
           }),
           py::keep_alive<1, 2>())
      .def("count", &BatchBlocks::count)
      .def("first", &BatchBlocks::first)
      .def("owned", [](BatchBlocks const& blocks,
                       int index) { return std::pair(blocks.owned(index).begin, blocks.owned(index).end); })
      .def("of_one", &BatchBlocks::of_one)
      .def("of_block",
           [](BatchBlocks const& blocks, int index, int heads, bool side_by_side) {
             auto const [head, block] = blocks.of_block(index, heads, side_by_side);
             return std::pair(head, block);
           })
      .def("sequence", &BatchBlocks::sequence);

  py::class_<RowTile>(module, "RowTile")
      .def_readonly("chunks", &RowTile::chunks)
      .def_readonly("shared", &RowTile::shared)
      .def_readonly("of_block", &RowTile::of_block)
      .def_readonly("plain_only", &RowTile::plain_only)
      .def("rows", &RowTile::rows)
      .def("capacity", &RowTile::capacity);
  module.def("row_tiles", [](int element_bytes, bool backward) {
    RowTiles const rows = row_tiles(element_bytes, backward);
    return std::vector(rows.tiles, rows.tiles + rows.count);
  });
  py::class_<RowSoftmaxPlan>(module, "RowSoftmaxPlan")
      .def_readonly("tile", &RowSoftmaxPlan::tile)
      .def_readonly("threads", &RowSoftmaxPlan::threads)
      .def_readonly("parts", &RowSoftmaxPlan::parts)
      .def_readonly("teams", &RowSoftmaxPlan::teams)
      .def_readonly("workspace_bytes", &RowSoftmaxPlan::workspace_bytes);
  module.def("plan_row_softmax", [](int rows, int columns, int element_bytes, bool aligned, bool plain,
                                    bool backward, int multiprocessors) {
    return plan_row_softmax({1, 1, rows, columns}, element_bytes, aligned, plain, backward, multiprocessors);
  });
  module.def("row_softmax_workspace", [](int rows, int columns, int element_bytes, bool backward) {
    return row_softmax_workspace({1, 1, rows, columns}, element_bytes, backward);
  });

  py::class_<BackwardTile>(module, "BackwardTile")
      .def_readonly("block_m", &BackwardTile::block_m)
      .def_readonly("block_n", &BackwardTile::block_n)
      .def_readonly("cluster", &BackwardTile::cluster)
      .def_readonly("lse_delta_mma", &BackwardTile::lse_delta_mma)
      .def("smem_bytes",
           [](BackwardTile const& tile, int head_dim) { return tile.smem_bytes(head_dim, kBytes); });
  module.def("backward_tiles", [](Family family, int head_dim) {
    BackwardTiles const tiles = backward_tiles(family, head_dim);
    return std::vector(tiles.keys, tiles.keys + tiles.count());
  });
  py::class_<BackwardPlan>(module, "BackwardPlan")
      .def_readonly("tile", &BackwardPlan::tile)
      .def_readonly("runs_kv", &BackwardPlan::runs_kv)
      .def_property_readonly("runs_dq_alone",
                             [](BackwardPlan const& plan) { return plan.dq.method == DqMethod::alone; })
      .def_property_readonly("accumulates_dq",
                             [](BackwardPlan const& plan) { return plan.dq.is_accumulated(); })
      .def_property_readonly("ordered", [](BackwardPlan const& plan) { return plan.dq.ordered; })
      .def_property_readonly("zero_fills_dq",
                             [](BackwardPlan const& plan) { return plan.dq.begin != DqBegin::nothing; })
      .def_property_readonly("converts_dq", [](BackwardPlan const& plan) { return plan.dq.is_converted; })
      .def_property_readonly("gqa_splits", [](BackwardPlan const& plan) { return plan.gqa.splits; })
      .def_readonly("lse_delta_in_dq", &BackwardPlan::lse_delta_in_dq)
      .def_property_readonly("section", [](BackwardPlan const& plan) { return plan.order.section.value; })
      .def_property_readonly("last_section",
                             [](BackwardPlan const& plan) { return plan.order.last_section.value; })
      .def_readonly("rows", &BackwardPlan::rows)
      .def_readonly("tiles", &BackwardPlan::tiles)
      .def_readonly("blocks", &BackwardPlan::blocks)
      .def_readonly("preprocess_blocks", &BackwardPlan::preprocess_blocks)
      .def_readonly("kv_blocks", &BackwardPlan::kv_blocks)
      .def_readonly("q_blocks", &BackwardPlan::q_blocks)
      .def_property_readonly("workspace_bytes", [](BackwardPlan const& plan) { return plan.workspace.bytes; })
      .def_property_readonly("zero_filled", [](BackwardPlan const& plan) {
        return std::pair(plan.workspace.zero_begin, plan.workspace.zero_bytes);
      });
  // Where a plan of dense or packed tensors of these sizes has terms of queries: in dQ's memory? their first
  // byte, and then elements from row to row and how many lie side by side.
  module.def("terms", [](BackwardPlan const& plan, std::array<int, 6> const& sizes, bool packed) {
    constexpr uintptr_t kWorkspace = 1 << 20, kDq = uintptr_t(1) << 60;
    auto const [batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim] = sizes;
    int const offsets[] = {0};
    BackwardParams params{};
    params.shape = {batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim};
    params.element_bytes = kBytes;
    if (packed) params.lengths.cu_seqlens_q = offsets;
    params.dq = {reinterpret_cast<void*>(kDq), 0, 0, head_dim};
    BackwardWorkspace const parts = plan.parts(reinterpret_cast<void*>(kWorkspace), params);
    LseDeltaWorkspace const& found = parts.lse_delta;
    auto const address = reinterpret_cast<uintptr_t>(found.terms.data);
    bool const in_dq = address >= kDq;
    return std::tuple(std::pair(in_dq, address - (in_dq ? kDq : kWorkspace)), found.terms.row_stride,
                      1 << found.log2_terms_of_row);
  });
  // The regions of a workspace of the backward in memory: name, first byte, and bytes as the plan has them,
  // and where kernels find each.
  module.def("workspace_regions", [](BackwardPlan const& plan, int batch, bool packed) {
    constexpr uintptr_t kWorkspace = 1 << 20, kDq = uintptr_t(1) << 60;
    int const offsets[] = {0};
    BackwardParams params{};
    params.shape.batch = batch;
    params.element_bytes = kBytes;
    if (packed) params.lengths.cu_seqlens_q = offsets;
    params.dq.data = reinterpret_cast<void*>(kDq);
    BackwardWorkspace const parts = plan.parts(reinterpret_cast<void*>(kWorkspace), params);
    void const* const found[] = {parts.lse_delta.lse,
                                 parts.lse_delta.delta,
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
                                 parts.varlen.offsets_k};
    static_assert(std::size(found) == kWorkspaceRegions);
    std::vector<std::tuple<std::string, int64_t, int64_t, int64_t>> regions;
    for (int i = 0; i < kWorkspaceRegions; ++i) {
      auto const [begin, bytes] = plan.workspace.regions[i];
      if (!found[i]) continue;
      regions.emplace_back(kWorkspaceRegionNames[i], begin, bytes,
                           int64_t(reinterpret_cast<uintptr_t>(found[i]) - kWorkspace));
    }
    return regions;
  });
  module.def("plan_backward", [](Family family, int bucket, VarlenBatch const& batch, int smem_bytes,
                                 bool needs_dq, bool needs_dkv, bool deterministic, int multiprocessors) {
    BackwardParams params{};
    params.shape = batch.params.shape;
    params.lengths = batch.params.lengths;
    params.element_bytes = kBytes;
    params.device.smem_bytes = smem_bytes;
    params.device.multiprocessors = multiprocessors;
    params.device.l2_bytes = 50 << 20;
    return plan_backward(family, bucket, params, batch.mask, needs_dq, needs_dkv, deterministic);
  });
  // What a kernel finds out about sequences that differ in length: see varlen_prepare.
  struct KeyNumbers {
    int is_uniform = 1;
    std::vector<int> kv_block_offsets, offsets_q, offsets_k;
  };
  static auto const varlen_prepare = [](BackwardParams& params, WindowMask const& mask, Family family,
                                        BackwardPlan const& plan) {
    auto numbers = std::make_unique<KeyNumbers>();
    auto& [is_uniform, kv_block_offsets, offsets_q, offsets_k] = *numbers;
    int const batch = params.shape.batch;
    int const block_n = plan.tile.block_n;
    auto order_offsets = [&](int const* offsets, int total, std::vector<int>& ordered) {
      for (int b = 0, most = 0; offsets && b <= batch; ++b) {
        ordered.push_back(most = larger(most, smaller(offsets[b], total)));
      }
      return offsets ? ordered.data() : nullptr;
    };
    params.workspace.varlen.offsets_q =
        order_offsets(params.lengths.cu_seqlens_q, params.shape.seqlen_q, offsets_q);
    params.workspace.varlen.offsets_k =
        order_offsets(params.lengths.cu_seqlens_k, params.shape.seqlen_k, offsets_k);
    params = params.with_ordered_offsets();
    kv_block_offsets.resize(batch + 1);
    for (int b = 0; b < batch; ++b) {
      kv_block_offsets[b + 1] =
          kv_block_offsets[b] + (family == Family::sm80 ? kv_blocks<Family::sm80>(params, mask, b, block_n)
                                                        : kv_blocks<Family::sm90>(params, mask, b, block_n));
      is_uniform &= kv_block_offsets[b + 1] - kv_block_offsets[b] == plan.order.m_blocks;
    }
    params.workspace.varlen.is_uniform = &is_uniform;
    params.workspace.varlen.kv_block_offsets = kv_block_offsets.data();
    return numbers;
  };
  // Of each block of keys on Hopper (batch entry, head of K and V, first key of those that count) and the
  // (head, block) of queries that its steps are for.
  module.def("key_tiles", [](int bucket, VarlenBatch const& batch, bool deterministic, int multiprocessors) {
    BackwardParams params{};
    params.shape = batch.params.shape;
    params.lengths = batch.params.lengths;
    params.element_bytes = kBytes;
    params.device = {
        .index = 0, .multiprocessors = multiprocessors, .smem_bytes = 232448, .l2_bytes = 50 << 20};
    BackwardPlan const plan =
        plan_backward(Family::sm90, bucket, params, batch.mask, true, true, deterministic);
    plan.split_groups(params);
    auto const [block_m, block_n] = std::pair(plan.tile.block_m, plan.tile.block_n);
    auto const numbers = varlen_prepare(params, batch.mask, Family::sm90, plan);
    KvTileScheduler<WindowMask> const order{plan.order, plan.tiles,       block_m,
                                            block_n,    plan.query_start, batch.mask};
    std::vector<std::pair<std::tuple<int, int, int>, std::vector<std::pair<int, int>>>> tiles;
    for (int index = 0; index < order.count(params); ++index) {
      KvTile const tile = order(params, index);
      if (!has_rows(tile.n_begin, tile.sequence.mask.seqlen_k)) {
        if (params.lengths.given) throw std::runtime_error("a tile without keys");
        continue;
      }
      std::vector<std::pair<int, int>> steps;
      int const heads = params.shape.heads_q / params.shape.heads_kv;
      for (QBlockIterator at(tile, heads, block_m, block_n); at.left > 0; at.advance()) {
        steps.emplace_back(at.head, at.block);
      }
      tiles.push_back({{tile.batch, tile.head_kv, tile.sequence.k_begin + tile.n_begin}, steps});
    }
    return tiles;
  });

  // Of each block of keys in the Ampere family: batch entry, head of K and V, first key; in the launch order.
  module.def("key_tiles_sm80", [](int bucket, VarlenBatch const& batch, int multiprocessors) {
    BackwardParams params{};
    params.shape = batch.params.shape;
    params.lengths = batch.params.lengths;
    params.element_bytes = kBytes;
    params.device = {
        .index = 0, .multiprocessors = multiprocessors, .smem_bytes = 232448, .l2_bytes = 50 << 20};
    BackwardPlan const plan = plan_backward(Family::sm80, bucket, params, batch.mask, true, true, false);
    plan.split_groups(params);
    std::unique_ptr<KeyNumbers> numbers;
    if (plan.workspace.regions[int(WorkspaceRegion::is_uniform)].bytes > 0)
      numbers = varlen_prepare(params, batch.mask, Family::sm80, plan);
    KvTileSchedulerSm80<WindowMask> const order{plan.order, batch.mask};
    std::vector<std::tuple<int, int, int>> tiles;
    for (int index = 0; index < plan.blocks; ++index) {
      KvTile const tile = order(params, plan.tile.block_m, plan.tile.block_n, index);
      if (!has_rows(tile.n_begin, tile.sequence.mask.seqlen_k)) continue;
      tiles.emplace_back(tile.pair / params.shape.heads_kv, tile.head_kv, tile.n_begin);
    }
    return tiles;
  });

  // For each index of the order in which dQ is converted: the M block's pair, sequence, head, number in the
  // head, whether it has rows, and its first row in the sequence.
  module.def("rows_order", [](VarlenBatch const& batch, int block_m) {
    BackwardParams params{};
    params.shape = batch.params.shape;
    params.lengths = batch.params.lengths;
    params.element_bytes = kBytes;
    ProblemShape const& shape = params.shape;
    BatchBlocks const queries{params.lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, block_m};
    DqConvertOrder<WindowMask> const order{params, batch.mask, queries};
    std::vector<std::tuple<int, int, int, int, bool, int>> blocks;
    for (int index = 0; index < order.count(); ++index) {
      DqConvertOrder<WindowMask>::Block const block = order(index);
      blocks.emplace_back(block.pair, block.sequence.index, block.head, block.block_of_head, block.exists,
                          block.begin);
    }
    return blocks;
  });

  // Every tile of every part, cut sequences first, as a list has them: (entry, head, m_begin, first key,
  // keys, blocks of keys of the part, slot, part, parts). lengths: as of PartLengths.
  // is_uniform: do all sequences have the lengths of the shape, so that nothing is listed?
  module.def("split_tiles", [](VarlenBatch const& batch, int block_m, int groups, int packed,
                               std::array<int, 6> const& lengths, bool is_uniform) {
    auto const [block_n, blocks, rounds, least_blocks, fixed_blocks, rows] = lengths;
    ForwardParams const& params = batch.params;
    SplitOrder const order =
        SplitOrder::make(params, batch.mask, PackedRows(block_m / groups, groups, packed),
                         {block_n, blocks, rounds, least_blocks, fixed_blocks, rows}, false, is_uniform);
    std::vector<std::tuple<int, int, int, int, int, std::pair<int, int>, int, int, int>> tiles;
    auto add = [&](PartTile const& tile) {
      tiles.emplace_back(tile.batch, tile.head, tile.m_begin, tile.k_first, tile.seqlen_k,
                         std::pair(tile.block_begin, tile.block_end), tile.slot, tile.part, tile.parts);
    };
    if (is_uniform) {
      for (int index = 0; index < order.tiles(); ++index) add(order(index));
      return std::pair(tiles, order.capacity);
    }
    std::vector<std::pair<int, SplitSequence>> sequences;
    SplitWork work{};
    for (int b = 0; b < params.shape.batch; ++b) {
      sequences.emplace_back(b, SplitOrder::sequence_of(params, batch.mask, b));
      work = work + order.work(sequences.back().second);
    }
    int const part_blocks = order.part_blocks(work), packs = order.packs_of_all.value;
    std::ranges::stable_partition(sequences, [&](auto const& s) {
      return s.second.used > 0 && order.parts(s.second, part_blocks) > 1;
    });
    int first_block = 0;
    for (auto const& [b, sequence] : sequences) {
      if (sequence.used == 0) continue;
      SplitRecord const record = order.record(b, sequence, first_block, part_blocks);
      int const m_blocks = record.m_blocks * record.parts;
      for (int index = first_block * packs; index < (first_block + m_blocks) * packs; ++index)
        add(order.tile(record, index));
      first_block += m_blocks;
    }
    return std::pair(tiles, order.capacity);
  });

  py::class_<ForwardPlan>(module, "ForwardPlan")
      .def_readonly("tile", &ForwardPlan::tile)
      .def_readonly("blocks", &ForwardPlan::blocks)
      .def_readonly("prepares", &ForwardPlan::prepares)
      .def_readonly("dynamic", &ForwardPlan::dynamic)
      .def_readonly("order", &ForwardPlan::order)
      .def_property_readonly("splits", &ForwardPlan::splits)
      .def_property_readonly("partial_offset",
                             [](ForwardPlan const& plan) { return plan.split.partial_offset; })
      .def_property_readonly("slots", [](ForwardPlan const& plan) { return plan.split.slots; })
      .def_readonly("workspace_bytes", &ForwardPlan::workspace_bytes)
      .def_property_readonly("packed_heads", [](ForwardPlan const& plan) { return plan.rows.packed.value; })
      .def_property_readonly("tile_queries",
                             [](ForwardPlan const& plan) { return plan.rows.tile_queries(); });
  module.def("plan_forward", [](Family family, int bucket, VarlenBatch const& batch, int multiprocessors,
                                int64_t l2_bytes) {
    ForwardParams params = batch.params;
    params.device = {.index = 0, .multiprocessors = multiprocessors, .smem_bytes = 0, .l2_bytes = l2_bytes};
    int split_bucket = bucket;  // of the smallest that holds this one
    while (split_bucket <= 256 && forward_tiles(family, split_bucket).few.warps == 0) split_bucket += 8;
    return plan_forward(family, bucket, split_bucket, params, batch.mask);
  });

  py::class_<Divisor>(module, "Divisor")
      .def(py::init<int>())
      .def("quotient", &Divisor::quotient)
      .def("remainder", &Divisor::remainder);

  py::class_<ForwardTile>(module, "ForwardTile")
      .def_readonly("block_m", &ForwardTile::block_m)
      .def_readonly("block_n", &ForwardTile::block_n)
      .def_readonly("stages", &ForwardTile::stages)
      .def_readonly("warps", &ForwardTile::warps);
  module.def(
      "forward_tiles",
      [](Family family, int head_dim, int element_bytes) {
        ForwardTiles const tiles = forward_tiles(family, head_dim, element_bytes);
        return std::tuple(tiles.main, tiles.small, tiles.few, tiles.many);
      },
      py::arg("family"), py::arg("head_dim"), py::arg("element_bytes") = 2);

  module.def("instances", &instances);

  // The compiled head dim that serves a problem; 0 if there is none.
  module.def("bucket", [](Pass pass, Family family, ElementType element, int head_dim) {
    int bucket = 0;
    auto keep = [&]<class Instance>(Instance) { bucket = Instance::head_dim; };
    bool const found = pass == Pass::forward
                           ? visit_instance<Pass::forward>(family, element, Variant::plain, head_dim, keep)
                           : visit_instance<Pass::backward>(family, element, Variant::plain, head_dim, keep);
    return found ? bucket : 0;
  });
}
