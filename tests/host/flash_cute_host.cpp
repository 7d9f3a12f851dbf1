// The device-independent C++ as a Python module, for tests/host/test_host.py.
#define FLASH_CUTE_WITH_CUDA  // the dispatcher reads compiled.def, here the one beside this file

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "flash_cute/attention/mask.hpp"
#include "flash_cute/attention/scheduler.hpp"
#include "flash_cute/attention/tiles.hpp"
#include "flash_cute/core/dispatch.hpp"
#include "flash_cute/params.hpp"

namespace py = pybind11;
using namespace flash_cute;

// Every offset is a sum of products with one of these: 64 bits wide, or tensors over 2^31 elements break.
static_assert(std::is_same_v<decltype(TensorView::batch_stride), int64_t>);
static_assert(std::is_same_v<decltype(TensorView::head_stride), int64_t>);
static_assert(std::is_same_v<decltype(TensorView::row_stride), int64_t>);

namespace {

std::pair<int, int> as_pair(BlockRange range) { return {range.begin, range.end}; }

// The names in instances.def, one list per axis.
struct Instances {
  std::vector<std::string> families, elements;
  std::vector<int> head_dims;
};

Instances instances() {
  Instances list;
#define FLASH_CUTE_FAMILY(name) list.families.push_back(#name);
#define FLASH_CUTE_ELEMENT(name) list.elements.push_back(#name);
#define FLASH_CUTE_HEAD_DIM(size) list.head_dims.push_back(size);
#include "flash_cute/instances.def"
  return list;
}

}  // namespace

PYBIND11_MODULE(flash_cute_host, module) {
  py::enum_<Family>(module, "Family").value("sm80", Family::sm80).value("sm90", Family::sm90);
  py::enum_<ElementType>(module, "ElementType")
      .value("fp16", ElementType::fp16)
      .value("bf16", ElementType::bf16);

  py::class_<WindowMask>(module, "WindowMask")
      .def(py::init(&WindowMask::make))
      .def_readonly("left", &WindowMask::left)
      .def_readonly("right", &WindowMask::right)
      .def("visible", &WindowMask::visible)
      .def("visited", [](WindowMask const& mask, int m_begin, int block_m,
                         int block_n) { return as_pair(mask.visited(m_begin, block_m, block_n)); })
      .def("unmasked", [](WindowMask const& mask, int m_begin, int block_m,
                          int block_n) { return as_pair(mask.unmasked(m_begin, block_m, block_n)); })
      .def("first_reachable_key", &WindowMask::first_reachable_key)
      .def("visible_pairs", &WindowMask::visible_pairs);

  py::class_<TileOrder>(module, "TileOrder")
      .def(py::init([](std::tuple<int, int, int, int, int, int> sizes, WindowMask const& mask, int block_m,
                       int groups, int packed, int element_bytes, int64_t l2_bytes, int wanted_tiles) {
        auto const [batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim] = sizes;
        PackedRows const rows(block_m / groups, groups, packed);
        return TileOrder::make({batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim}, mask, rows,
                               element_bytes, l2_bytes, wanted_tiles);
      }))
      .def("tiles", &TileOrder::tiles)
      .def_property_readonly("section", [](TileOrder const& order) { return order.section.value; })
      .def("__call__",
           [](TileOrder const& order, int index) {
             TileCoord const tile = order(index);
             return std::tuple(tile.m_begin, tile.head, tile.head_kv, tile.batch);
           })
      .def("row",  // (query, head) of a row, counted from the tile's first; none where the row is unused
           [](TileOrder const& order, int group, int row) -> std::optional<std::pair<int, int>> {
             if (!order.rows.uses(row)) return std::nullopt;
             return std::pair(group * order.rows.queries + order.rows.query(row), order.rows.head(row));
           })
      .def("stream", [](TileOrder const& order, int block, int blocks) {
        TileStream tiles{order, block, blocks};
        std::vector<std::tuple<int, int, int>> list;
        for (int left = tiles.count(); left > 0; --left) {
          TileCoord const tile = tiles.next();
          list.emplace_back(tile.m_begin, tile.head, tile.batch);
        }
        return list;
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
  module.def("forward_tiles", [](Family family, int head_dim) {
    ForwardTiles const tiles = forward_tiles(family, head_dim);
    return std::pair(tiles.main, tiles.small);
  });

  py::class_<Instances>(module, "Instances")
      .def_readonly("families", &Instances::families)
      .def_readonly("elements", &Instances::elements)
      .def_readonly("head_dims", &Instances::head_dims);
  module.def("instances", &instances);

  // The compiled head dim that serves a problem; 0 if there is none.
  module.def("bucket", [](Family family, ElementType element, int head_dim) {
    int bucket = 0;
    bool const found =
        visit_instance(family, element, head_dim, [&]<class Kernel>(Kernel) { bucket = Kernel::head_dim; });
    return found ? bucket : 0;
  });
}
