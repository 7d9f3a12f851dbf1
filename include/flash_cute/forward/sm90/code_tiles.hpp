// How the kernel of codes of 8 bits gets its tiles: a warp takes them and has their rows of Q ready in shared
// memory, as operands of mma.sync, before the tile before ends.
#pragma once

#include <cuda_bf16.h>

#include "flash_cute/core/accumulator.hpp"
#include "flash_cute/core/special_registers.hpp"
#include "flash_cute/forward/sm90/code_traits.hpp"

namespace flash_cute {

// The warp that takes tiles.
template <class Traits>
struct CodeTilesSm90 {
  using Element = typename Traits::Element;
  static constexpr int kOwnK = Traits::kOwnK, kSteps = Traits::kSteps, kStepsAtOnce = Traits::kStepsAtOnce,
                       kWords = kOwnK / 2;  // that a lane loads at once
  using Words = uint32_t[kSteps / kStepsAtOnce][kWords];
  typename Traits::SharedStorage& shared;
  ForwardParams const& params;
  typename Traits::Source const& source;
  int* tile_counter;
  int lane;

  CUTE_DEVICE void run(SplitTile tile) const {
    for (PipelineState<2> at{};; at.advance()) {
      auto& full = shared.ring_tiles.acquire(at);
      auto& target = shared.tiles[at.stage];
      bool const is_tile = tile.m_begin != kNoTile;
      if (is_tile) load_q(tile, target);
      if (lane == 0) target.tile = tile;
      __syncwarp();
      if (lane == 0) full.arrive();
      if (!is_tile) return;
      int index = kNoTile;
      if (tile_counter) {
        shared.requested.wait(at.stage);  // which is the parity of the round
        if (lane == 0) index = read_grid_size() + atomicAdd(tile_counter, 1);
        index = __shfl_sync(~0u, index, 0);
      }
      tile.m_begin = kNoTile;
      if (unsigned(index) < unsigned(source.tiles(shared.list))) tile = source.tile(shared.list, index);
    }
  }

 private:
  // Rows without a query become zeros.
  template <class Target>
  CUTE_DEVICE void load_q(SplitTile const& tile, Target& target) const {
    PackGqa const& rows = source.rows();
    RowCoord const first = source.operands.query(tile, tile.m_begin);
    int const first_column = lane % 4 * kOwnK;
    Element const* const data = static_cast<Element const*>(params.q.data) +
                                first.entry * params.q.batch_stride + tile.head * params.q.head_stride +
                                first.row * params.q.row_stride + first_column;
    Words words[2];
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const row = lane / 4 + 8 * half, query = rows.query(row);
      bool const is_query = rows.uses(row) && tile.m_begin + query < tile.seqlen_q;
      Element const* const from = data + query * params.q.row_stride + rows.head(row) * params.q.head_stride;
      CUTE_UNROLL
      for (int i = 0; i < kSteps / kStepsAtOnce; ++i) {
        int const column = i * 4 * kOwnK;
        CUTE_UNROLL
        for (int word = 0; word < kWords; word += 4) {
          bool const exists = is_query && first_column + column + 2 * word < params.shape.head_dim;
          *reinterpret_cast<uint4*>(words[half][i] + word) =
              exists ? *reinterpret_cast<uint4 const*>(from + column + 2 * word) : uint4{};
        }
      }
    }
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      float of_row = 1.f;
      bool const is_used = rows.used() > 8 * half;
      if (!std::is_same_v<Element, cutlass::half_t> && is_used) of_row = to_half(words[half]);
      if (lane % 4 == 0) target.of_row[lane / 4 + 8 * half] = of_row;
    }
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      int const at = i / kStepsAtOnce, word = 2 * (i % kStepsAtOnce);
      target.q[i][lane] = {words[0][at][word], words[1][at][word], words[0][at][word + 1],
                           words[1][at][word + 1]};
    }
  }
  // A row of bfloat16 times a power of two, by which its largest number is below 2^15. Returns the inverse.
  CUTE_DEVICE static float to_half(Words& words) {
    auto visit = [&](auto&& visit_word) {
      CUTE_UNROLL
      for (int i = 0; i < kSteps / kStepsAtOnce * kWords; ++i) visit_word(words[i / kWords][i % kWords]);
    };
    auto as_pair = [](uint32_t word) { return reinterpret_cast<__nv_bfloat162 const&>(word); };
    __nv_bfloat162 largest = as_pair(0u);
    visit([&](uint32_t word) { largest = __hmax2(largest, as_pair(word & 0x7fff7fff)); });
    float highest = fmaxf(__low2float(largest), __high2float(largest));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
    float const exponent = __uint_as_float(__float_as_uint(highest) & 0x7f800000);
    float const power = fminf(fmaxf(exponent, 0x1p-100f), 0x1p127f), factor = 0x1p14f / power;
    visit([&](uint32_t& word) {
      word = pack<cutlass::half_t>(__uint_as_float(word << 16) * factor,
                                   __uint_as_float(word & 0xffff0000) * factor);
    });
    return power * 0x1p-14f;
  }
};

}  // namespace flash_cute
