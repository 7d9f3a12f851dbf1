// The order of tiles where sequences are cut into parts of their keys, so that a few long ones keep all
// multiprocessors busy. What is cut where follows from the lengths, on the device.
#pragma once

#include <cstdint>

#include "flash_cute/scheduler/varlen_order.hpp"

namespace flash_cute {

struct SplitSequence : Sequence {
  int k_first;  // the first key that some query can see, counted from the sequence's first key
};

// first_block counts the M blocks of all parts; k_begin is the row of the sequence's first key, which a query
// may see or not.
struct alignas(16) SplitRecord : SequenceRecord {
  int k_first;                 // as of PartTile
  int block_begin, block_end;  // blocks of keys that some query of the sequence sees, at least one
  int part_blocks, parts;
};

// All tiles of a sequence are cut at the same keys, and those of a part run side by side, so that L2 serves
// them by one read. Parts have at least ceil(blocks of keys of all tiles / wanted_items) blocks, and a
// sequence that has no more is not cut, so there are fewer than 2 x wanted_items tiles of cut sequences,
// whatever the lengths. These come first: the number of such a tile is the slot of its partial result.
struct SplitOrder : VarlenOrder {
  using Record = SplitRecord;
  static constexpr bool kSplits = true;
  static constexpr int kFewSequences = 40;  // see VarlenOrder
  int block_n;
  int wanted_items, least_blocks;
  SplitRecord alike;     // of sequence 0 of a uniform batch, whose others are as it is; parts is 0 else
  Divisor blocks_alike;  // M blocks of each of these

  static SplitOrder make(ForwardParams const& params, PackedRows const& rows, bool is_prepared,
                         bool descending, int block_n, int wanted_items, int least_blocks) {
    SplitOrder order{VarlenOrder::make(params, rows, 0, is_prepared, descending),
                     block_n,
                     wanted_items,
                     least_blocks,
                     {},
                     {}};
    order.capacity = list_capacity(params, rows, wanted_items);
    return order;
  }
  template <class Mask>
  static SplitOrder make_uniform(ForwardParams const& params, Mask const& mask, PackedRows const& rows,
                                 bool descending, int block_n, int wanted_items, int least_blocks) {
    SplitOrder order = make(params, rows, false, descending, block_n, wanted_items, least_blocks);
    SplitSequence const sequence = sequence_of(params, mask, 0);
    order.alike = order.record(0, sequence, 0, order.part_blocks(order.work(sequence) * order.batch));
    order.blocks_alike = Divisor(order.alike.m_blocks * order.alike.parts);
    order.capacity = order.batch * int(order.blocks_alike.value);
    return order;
  }

  FLASH_CUTE_HOST_DEVICE bool is_uniform() const { return alike.parts > 0; }
  // Of a uniform batch: the sequence of an M block.
  FLASH_CUTE_HOST_DEVICE SplitRecord record_alike(int m_block) const {
    SplitRecord record = alike;
    record.batch = blocks_alike.quotient(m_block);
    record.first_block = record.batch * int(blocks_alike.value);
    return record;
  }

  // M blocks, those of parts counted one by one.
  static int list_capacity(ForwardParams const& params, PackedRows const& rows, int wanted_items) {
    int const packs_of_all = rows.packs(params.shape.heads_q / params.shape.heads_kv) * params.shape.heads_kv;
    return int(m_block_capacity(params, rows)) + ceil_div(wanted_items, packs_of_all);
  }

  FLASH_CUTE_HOST_DEVICE SplitRecord* prepared() const { return reinterpret_cast<SplitRecord*>(header + 1); }

  template <class Mask>
  FLASH_CUTE_HOST_DEVICE static SplitSequence sequence_of(ForwardParams const& params, Mask const& limits,
                                                          int b) {
    int const* const offsets = params.lengths.cu_seqlens_k;
    Sequence const s = sequence(params.shape, params.lengths, limits, b);
    int const begin = offsets ? larger(0, smaller(offsets[b], params.shape.seqlen_k)) : 0;
    return {s, s.k_begin - begin};
  }

  // Blocks of keys that some query of the sequence sees, one at least.
  FLASH_CUTE_HOST_DEVICE BlockRange visited(SplitSequence const& s) const {
    int const begin = s.k_first / block_n, end = s.k_first + larger(0, s.mask.end_key(s.used - 1));
    return {begin, larger(begin + 1, ceil_div(end, block_n))};
  }
  // Blocks of keys of all the sequence's tiles.
  FLASH_CUTE_HOST_DEVICE int64_t work(SplitSequence const& s) const {
    BlockRange const blocks = visited(s);
    return int64_t(VarlenOrder::m_blocks(s)) * int(packs_of_all.value) * (blocks.end - blocks.begin);
  }
  FLASH_CUTE_HOST_DEVICE int part_blocks(int64_t work_of_all) const {
    int64_t const even = (work_of_all + wanted_items - 1) / wanted_items;
    return int(larger<int64_t>(least_blocks, smaller<int64_t>(even, 1 << 30)));
  }
  FLASH_CUTE_HOST_DEVICE int parts(SplitSequence const& s, int part_blocks) const {
    BlockRange const blocks = visited(s);
    return ceil_div(blocks.end - blocks.begin, part_blocks);
  }

  FLASH_CUTE_HOST_DEVICE SplitRecord record(int b, SplitSequence const& s, int first_block,
                                            int part_blocks) const {
    BlockRange const blocks = visited(s);
    SplitRecord record{VarlenOrder::record(b, s, first_block),
                       s.k_first,
                       blocks.begin,
                       blocks.end,
                       part_blocks,
                       parts(s, part_blocks)};
    record.k_begin = s.k_begin - s.k_first;
    return record;
  }

  FLASH_CUTE_HOST_DEVICE PartTile tile(SplitRecord const& found, int index) const {
    unsigned const of_part = found.m_blocks * packs_of_all.value;
    int const part = int(unsigned(index - found.first_block * int(packs_of_all.value)) / of_part);
    int const begin = found.block_begin + part * found.part_blocks;
    return {VarlenOrder::tile(found, index - part * int(of_part)),
            found.k_first,
            begin,
            smaller(found.block_end, begin + found.part_blocks),
            found.parts > 1 ? index : PartTile::kWhole,
            part,
            found.parts,
            int(of_part)};
  }
  FLASH_CUTE_HOST_DEVICE PartTile operator()(int index) const {
    return tile(prepared()[packs_of_all.quotient(index)], index);
  }
};

}  // namespace flash_cute
