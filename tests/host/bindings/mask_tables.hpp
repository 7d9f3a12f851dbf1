// Where a table of a mask has what: offsets into its memory, which here is on the host.
#pragma once

#include "bindings/changes.hpp"
#include "bindings/sequences.hpp"
#include "flash_cute/attention/mask/mask_table.hpp"

namespace flash_cute::host {

struct PlacedTable {
  ForwardParams params;
  std::vector<char> memory;
  MaskTable table;

  PlacedTable(VarlenBatch const& batch, py::dict const& changes, int block_m, int block_n, bool transposes)
      : params(batch.params) {
    Changes(changes).apply(params);
    memory.resize(MaskTable::bytes(params, block_m, block_n, transposes));
    table = MaskTable::make(params, memory.data(), block_m, block_n, transposes);
  }
  PlacedTable(PlacedTable const&) = delete;

  // First byte and bytes of so many values.
  template <class Value>
  std::pair<int64_t, int64_t> place(Value const* values, int64_t count) const {
    return {reinterpret_cast<char const*>(values) - memory.data(), count * int64_t(sizeof(Value))};
  }
};

inline void bind_mask_tables(py::module_& module) {
  using Table = PlacedTable const&;
  py::class_<PlacedTable>(module, "MaskTable")
      .def(py::init<VarlenBatch const&, py::dict const&, int, int, bool>(), py::keep_alive<1, 2>())
      .def_property_readonly("bytes", [](Table placed) { return placed.memory.size(); })
      .def_static("bytes_of",  // of one for blocks of 128 queries and keys
                  [](VarlenBatch const& batch, py::dict const& changes) {
                    ForwardParams params = batch.params;
                    Changes(changes).apply(params);
                    return MaskTable::bytes(params, 128, 128, /*transposes=*/false);
                  })
      // Of a query's row of a sequence that begins at q_begin of its entry.
      .def("ranges",
           [](Table placed, int b, int head, int q_begin, int row) {
             TableMask const mask = placed.table.mask(b, head, q_begin, 1, 1);
             return placed.place(mask.ranges + int64_t(row) * mask.count, mask.count);
           })
      .def("bits",
           [](Table placed, int b, int head, int q_begin, int row) {
             TableMask const mask = placed.table.mask(b, head, q_begin, 1, 1);
             return mask.bits ? placed.place(mask.bits_of(row), placed.table.bits_words)
                              : std::pair<int64_t, int64_t>{-1, 0};
           })
      .def("sees",
           [](Table placed, int b, int head, int q_begin, int row) {
             TableMask const mask = placed.table.mask(b, head, q_begin, 1, 1);
             return mask.sees ? placed.place(mask.sees + row, 1) : std::pair<int64_t, int64_t>{-1, 0};
           })
      .def("key_bits",
           [](Table placed, int b, int head, int m_begin) {
             int const m_block = placed.table.m_block(b, head, m_begin);
             return placed.place(placed.table.key_bits_of(m_block), placed.table.words);
           })
      .def("visited",
           [](Table placed, int b, int head, int m_begin) {
             return placed.place(placed.table.visited + placed.table.m_block(b, head, m_begin), 1);
           })
      .def("query_bits",
           [](Table placed, int b, int head_kv, int n_block) {
             return placed.place(placed.table.query_bits_of(b, head_kv, n_block), placed.table.chunks);
           })
      // Makes one query of a head see keys, or none, and nothing else.
      .def("write",
           [](PlacedTable& placed, int b, int head, int q_begin, int row, bool sees) {
             std::ranges::fill(placed.memory, 0);
             if (placed.table.bits) {
               placed.table.sees_of(b, head, q_begin)[row] = sees;
             } else {
               placed.table.ranges_of(b, q_begin)[int64_t(row) * placed.table.count] = {3, 3 + sees};
             }
           })
      .def("sees_any_key",  // row: of the entry
           [](Table placed, int b, int head, int row) {
             return sees_any_key(placed.params, placed.memory.data(), b, head, row);
           })
      .def("is_fully_masked", [](Table placed, int b, int head, int q_begin, int row) {
        return placed.table.mask(b, head, q_begin, 1, 1).is_fully_masked(row);
      });
}

}  // namespace flash_cute::host
