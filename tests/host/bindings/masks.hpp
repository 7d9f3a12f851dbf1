// Masks: windows, ranges of keys, and the walks over tables of blocks.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "flash_cute/attention/mask/block_table.hpp"
#include "flash_cute/attention/mask/ranges.hpp"
#include "flash_cute/attention/mask/window.hpp"
#include "flash_cute/backward/params.hpp"
#include "flash_cute/backward/tile_scheduler.hpp"

namespace flash_cute::host {

namespace py = pybind11;

template <class Range>
std::pair<int, int> as_pair(Range const& range) {
  return {range.begin, range.end};
}

// A method of a window that gives a range of blocks, which becomes a pair.
inline auto pairs(BlockRange (WindowMask::*blocks)(int, int, int) const) {
  return [blocks](WindowMask const& mask, int begin, int tile, int block) {
    return as_pair((mask.*blocks)(begin, tile, block));
  };
}

// Every third block that is visited is full.
inline std::vector<BlockBits> block_bits_of(std::vector<uint32_t> const& visited) {
  std::vector<BlockBits> bits;
  for (uint32_t word : visited) {
    uint32_t full = 0;
    for (int i = 0; i < BlockBits::kBlocks; ++i)
      full |= uint32_t((bits.size() * BlockBits::kBlocks + i) % 3 == 0) << i;
    bits.push_back({word, word & full});
  }
  return bits;
}

inline auto steps_of(TableKvBlocks blocks) {
  std::vector<std::tuple<int, int, int, bool>> steps;
  for (; !blocks.done(); blocks.advance())
    steps.emplace_back(blocks.block, blocks.next(), blocks.remaining(), blocks.is_full(FullInTable{}));
  return steps;
}

inline void bind_masks(py::module_& module) {
  py::class_<WindowMask>(module, "WindowMask")
      .def(py::init(&WindowMask::make))
      .def_readonly("seqlen_q", &WindowMask::seqlen_q)
      .def_readonly("seqlen_k", &WindowMask::seqlen_k)
      .def("visible", &WindowMask::visible)
      .def("visited", pairs(&WindowMask::visited))
      .def("full", pairs(&WindowMask::full))
      .def("visited_rows", pairs(&WindowMask::visited_rows))
      .def("full_rows", pairs(&WindowMask::full_rows))
      .def("transposed", &WindowMask::transposed)
      .def("from_key", &WindowMask::from_key)
      .def("first_row", &WindowMask::first_row)
      .def("end_row", &WindowMask::end_row)
      .def("first_reachable_key", &WindowMask::first_reachable_key)
      .def("fully_masked_rows", &WindowMask::fully_masked_rows)
      .def("visible_pairs", &WindowMask::visible_pairs);

  module.def("cut_ranges",
             [](std::vector<std::pair<int, int>> const& given, int shift, WindowMask const& mask, int row) {
               std::vector<int> flat;
               for (auto [begin, end] : given) flat.insert(flat.end(), {begin, end});
               CutRanges const cut(flat.data(), int(given.size()), shift, mask, row);
               std::vector<std::pair<int, int>> list;
               for (KeyRange const& range : cut.ranges) list.push_back(as_pair(range));
               return list;
             });
  module.def("bits_between", [](int begin, int end) { return bits_between(begin, end); });
  module.def("walk_over_keys", [](std::vector<uint32_t> const& visited, int count) {
    auto const bits = block_bits_of(visited);
    return steps_of({bits.data(), int(bits.size()), count});
  });
  module.def("walk_over_part", [](std::vector<uint32_t> const& visited, int begin, int end) {
    auto const bits = block_bits_of(visited);
    return steps_of({bits.data(), BlockRange{begin, end}});
  });
  module.def("walk_over_queries", [](std::vector<uint32_t> const& visited, int blocks, int heads) {
    auto const bits = block_bits_of(visited);
    std::vector<std::tuple<int, int, bool>> steps;
    TableQBlockIterator walk({bits.data(), blocks}, KvTile{}, heads);
    for (; walk.left > 0; walk.advance())
      steps.emplace_back(walk.head, walk.block, walk.is_full(FullInTable{}));
    return steps;
  });
}

}  // namespace flash_cute::host
