// Batches of unequal lengths: which rows are whose, and the numbers of their blocks.
#pragma once

#include "bindings/masks.hpp"
#include "flash_cute/attention/batch_blocks.hpp"
#include "flash_cute/attention/sequence.hpp"
#include "flash_cute/params.hpp"
#include "flash_cute/scheduler/varlen_order.hpp"

namespace flash_cute::host {

constexpr int kBytes = element_bytes(ElementType::bf16);

// In the order of ProblemShape. The last one, of V, may be missing: it is then that of Q and K.
using Sizes = std::vector<int>;

inline ProblemShape shape_of(Sizes const& sizes) {
  if (sizes.size() != 6 && sizes.size() != 7) throw std::invalid_argument("sizes must be 6 or 7");
  return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes.back()};
}

// Params with tensors of lengths, which here are on the host.
struct VarlenBatch {
  using Lengths = std::array<std::optional<std::vector<int>>, 5>;  // in the order of LengthParams
  Lengths lengths;
  WindowMask mask;
  ForwardParams params{};

  VarlenBatch(Sizes const& sizes, WindowMask const& mask_, Lengths lengths_)
      : lengths(std::move(lengths_)), mask(mask_) {
    params.element_bytes = kBytes;
    auto pointer = [&](int index) { return lengths[index] ? lengths[index]->data() : nullptr; };
    params.shape = shape_of(sizes);
    params.lengths = {pointer(0), pointer(1), pointer(2), pointer(3), pointer(4), lengths != Lengths{}};
    params.lse_batch_stride = lengths[0] ? 0 : int64_t(params.shape.heads_q) * params.shape.seqlen_q;
  }
  VarlenBatch(VarlenBatch const&) = delete;
};

inline void bind_sequences(py::module_& module) {
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
             for_each_unwritten(batch.params, part, parts, [&](int entry, RowRange const& rows) {
               found.emplace_back(entry, rows.begin, rows.end);
             });
             return found;
           })
      .def("m_block_capacity", [](VarlenBatch const& batch, int block_m, int groups, int packed) {
        return m_block_capacity(batch.params, PackGqa(block_m / groups, groups, packed));
      });

  py::class_<BatchBlocks>(module, "BatchBlocks")
      .def(py::init([](VarlenBatch const& batch, bool of_queries, int block) {
             auto const& [shape, lengths] = std::tie(batch.params.shape, batch.params.lengths);
             return of_queries ? BatchBlocks{lengths.cu_seqlens_q, shape.seqlen_q, shape.batch, block}
                               : BatchBlocks{lengths.cu_seqlens_k, shape.seqlen_k, shape.batch, block};
           }),
           py::keep_alive<1, 2>())
      .def("count", &BatchBlocks::count)
      .def("first", &BatchBlocks::first)
      .def("owned", [](BatchBlocks const& blocks, int index) { return as_pair(blocks.owned(index)); })
      .def("sequence", &BatchBlocks::sequence);
}

}  // namespace flash_cute::host
