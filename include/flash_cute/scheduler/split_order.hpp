// The order of tiles where sequences are cut into splits of their keys, so that a few long ones keep all
// multiprocessors busy. What is cut where follows from the lengths, on the device.
#pragma once

#include <cstdint>

#include "flash_cute/scheduler/varlen_order.hpp"

namespace flash_cute {

struct SplitSequence : Sequence {
  int k_first;  // the first key that some query can see, counted from the sequence's first key
};

// first_block counts the M blocks of all splits; k_begin is the row of the sequence's first key, which a
// query may see or not.
struct alignas(16) SplitRecord : SequenceRecord {
  int k_first;                 // as of SplitTile
  int block_begin, block_end;  // blocks of keys of all splits
  int blocks_per_split, splits;
};

// Where results must not depend on other sequences, splits have so many keys, and O and sums are those of
// splits, added up (forward/fold.hpp), also where one tile has all of them.
constexpr int kFixedKeys = 1024;

// How long splits are.
struct SplitLengths {
  int block_n;
  int blocks;        // thread blocks that run at once
  int rounds;        // of them, at most, that splits are to take
  int least_blocks;  // of a part
  int fixed_blocks;  // of each split, where results must not depend on other sequences; else 0
  int rows;          // of a partial result
  bool folds;        // can a tile have several splits of a fixed length, see ForwardKernel::folds_splits?

  FLASH_CUTE_HOST_DEVICE int wanted_items() const { return blocks * rounds; }  // tiles of all splits, about

  // Of a fixed length. A partial result takes as long as `rows` sixteenths of a block of keys (see time), so
  // few sequences are cut where it is large: those that have more than about 1 / rounds of a share and twice
  // what the partial results of a share would add.
  FLASH_CUTE_HOST_DEVICE int most_whole(int share) const {
    int64_t const eighths = int64_t(share) * (8 * fixed_blocks + rows);
    int64_t const most = (eighths + 8 * fixed_blocks * rounds - 1) / (8 * fixed_blocks * rounds);
    return int(smaller<int64_t>(larger<int64_t>(fixed_blocks, most), 1 << 30));
  }
  // Of tiles that are equally long.
  FLASH_CUTE_HOST_DEVICE int most_whole_of_even(int64_t tiles, int longest) const {
    bool const are_cut = tiles < bound_of_cut() && 33 * int64_t(time(int(tiles), longest, fixed_blocks)) <
                                                       32 * int64_t(time(int(tiles), longest, longest));
    return are_cut ? fixed_blocks : larger(fixed_blocks, longest);
  }
  // So fewer tiles than this are cut.
  FLASH_CUTE_HOST_DEVICE int bound_of_cut() const {
    return ceil_div(wanted_items() * 8 * fixed_blocks, 8 * fixed_blocks + rows);
  }
  // Splits of a sequence of at most so many keys.
  FLASH_CUTE_HOST_DEVICE int most_fixed(int keys) const {
    return larger(1, ceil_div(ceil_div(keys, block_n), fixed_blocks));
  }

  // Tiles that are equally long, in splits of `split` blocks of keys: how long they take, in sixteenths of
  // what a block of keys does. Thread blocks take the longest splits first, so those at the ends of sequences
  // fill up the last round. Of head dims 64 and 128 (H200): a tile takes 0.5 to 0.9 blocks of keys beside its
  // own, 16 rows of a partial result about one, the kernel that combines them two.
  FLASH_CUTE_HOST_DEVICE int time(int tiles, int of_tile, int split) const {
    constexpr int kBlock = 16, kTile = 10, kCombine = 32;
    int const whole = of_tile / split, rest = of_tile - whole * split, items = tiles * whole;
    int const fixed = kTile + (split < of_tile ? rows : 0);
    int const full = ceil_div(items, blocks), spare = full * blocks - items;
    int const longer = kBlock * split + fixed, shorter = kBlock * rest + fixed;
    int64_t const fit = int64_t(spare) * (longer / shorter);
    int const left = rest > 0 ? int(larger<int64_t>(0, tiles - fit)) : 0;
    return full * longer + ceil_div(left, blocks) * shorter + (split < of_tile ? kCombine : 0);
  }
  // Of a tile's blocks of keys those of a split that round `round` ends with, or all of them in round 0.
  // share: of the work, what a thread block has of it.
  FLASH_CUTE_HOST_DEVICE int split_of(int of_tile, int share, int round) const {
    return round == 0 ? of_tile : smaller(of_tile, larger(least_blocks, ceil_div(share, round)));
  }
  struct Choice {
    int split, time;
  };
  // The blocks of keys of a split that take the least time, but no more splits for less than 3% of it.
  // choice(round): see split_of.
  template <class ChoiceOf>
  FLASH_CUTE_HOST_DEVICE int best_split(ChoiceOf&& choice) const {
    Choice best = choice(0);
    for (int round = 1; round <= rounds; ++round) {
      Choice const other = choice(round);
      if (33 * int64_t(other.time) < 32 * int64_t(best.time)) best = other;
    }
    return best.split;
  }
  FLASH_CUTE_HOST_DEVICE int best_split(int tiles, int of_tile, int share) const {
    return best_split([&](int round) {
      int const split = split_of(of_tile, share, round);
      return Choice{split, time(tiles, of_tile, split)};
    });
  }
};

// The blocks of keys that tiles compute.
struct SplitWork {
  int64_t blocks, tiles;
  int longest;  // blocks of one tile

  FLASH_CUTE_HOST_DEVICE SplitWork operator+(SplitWork const& other) const {
    return {blocks + other.blocks, tiles + other.tiles, larger(longest, other.longest)};
  }
  FLASH_CUTE_HOST_DEVICE bool is_even() const { return 7 * tiles * longest <= 8 * blocks; }
};

// All tiles of a sequence are cut at the same keys, and those of a split run side by side, so that L2 serves
// them by one read. Splits have at least ceil(blocks of keys of all tiles / wanted_items) blocks, and a
// sequence that has no more is not cut, so there are fewer than 2 x wanted_items tiles of cut sequences,
// whatever the lengths. These come first: the number of such a tile is the slot of its partial result.
// Splits of a fixed length start at multiples of it. Where tiles can have several, which sequences are cut
// changes no bit.
struct SplitOrder : VarlenOrder {
  using Record = SplitRecord;
  static constexpr int kFewSequences = 256;  // see SplitList
  SplitLengths lengths;
  bool prepared_by_kernel;  // is the list prepared? Its header is there in any case, but of a uniform batch
  SplitRecord uniform;      // of sequence 0 of a uniform batch, whose others are as it is; splits is 0 else
  Divisor blocks_per_sequence;  // M blocks of each of these

  // is_uniform: are all sequences as long as the shape says?
  static SplitOrder make(ForwardParams const& params, WindowMask const& mask, PackGqa const& rows,
                         SplitLengths const& lengths, VarlenListHeader* header, bool is_prepared,
                         bool is_uniform) {
    SplitOrder order{
        VarlenOrder::make(params, rows, 0, header, mask.is_longest_last()), lengths, is_prepared, {}, {}};
    order.capacity = int(list_capacity(params, rows, lengths));
    if (is_uniform) {
      SplitSequence const sequence = sequence_of(params, mask, 0);
      order.uniform = order.record(0, sequence, 0, order.blocks_per_split(order.work(sequence, order.batch)));
      order.blocks_per_sequence = Divisor(order.uniform.m_blocks * order.uniform.splits);
      order.capacity = order.batch * int(order.blocks_per_sequence.value);
    }
    return order;
  }

  // M blocks, those of splits counted one by one.
  static int64_t list_capacity(ForwardParams const& params, PackGqa const& rows,
                               SplitLengths const& lengths) {
    int64_t const m_blocks = m_block_capacity(params, rows);
    int const packs_of_all = rows.packs(params.shape.heads_q / params.shape.heads_kv) * params.shape.heads_kv;
    if (lengths.fixed_blocks == 0) return m_blocks + ceil_div(lengths.wanted_items(), packs_of_all);
    int64_t const most = lengths.most_fixed(params.shape.seqlen_k), all = m_blocks * most;
    return lengths.folds ? smaller(all, m_blocks + lengths.bound_of_cut() / packs_of_all * most) : all;
  }
  // Tiles of cut sequences, of splits of a fixed length, of a batch whose lengths the device alone knows.
  static int64_t slot_capacity(ForwardParams const& params, PackGqa const& rows,
                               SplitLengths const& lengths) {
    int const packs_of_all = rows.packs(params.shape.heads_q / params.shape.heads_kv) * params.shape.heads_kv;
    int64_t const most = lengths.most_fixed(params.shape.seqlen_k);
    int64_t const all = m_block_capacity(params, rows) * packs_of_all * most;
    return most == 1 ? 0 : lengths.folds ? smaller(all, lengths.bound_of_cut() * most) : all;
  }

  FLASH_CUTE_HOST_DEVICE bool is_prepared() const { return prepared_by_kernel; }
  FLASH_CUTE_HOST_DEVICE bool is_uniform() const { return uniform.splits > 0; }
  // Of a uniform batch: the sequence of an M block.
  FLASH_CUTE_HOST_DEVICE SplitRecord uniform_record(int m_block) const {
    SplitRecord record = uniform;
    record.batch = blocks_per_sequence.quotient(m_block);
    record.first_block = record.batch * int(blocks_per_sequence.value);
    return record;
  }

  FLASH_CUTE_HOST_DEVICE SplitRecord* prepared() const { return reinterpret_cast<SplitRecord*>(header + 1); }

  template <class Params>
  FLASH_CUTE_HOST_DEVICE static SplitSequence sequence_of(Params const& params, WindowMask const& limits,
                                                          int b) {
    int const* const offsets = params.lengths.cu_seqlens_k;
    Sequence const s = sequence(params.shape, params.lengths, limits, b);
    int const begin = offsets ? larger(0, smaller(offsets[b], params.shape.seqlen_k)) : 0;
    return {s, s.k_begin - begin};
  }

  // Blocks of keys that some query of the sequence sees, or one that is there and hidden.
  FLASH_CUTE_HOST_DEVICE BlockRange visited(SplitSequence const& s) const {
    int const end = s.k_first + larger(0, s.mask.end_key(s.used - 1));
    BlockRange const blocks{s.k_first / lengths.block_n, ceil_div(end, lengths.block_n)};
    return blocks.empty() ? BlockRange{0, 1} : blocks;
  }
  // Of `count` such sequences.
  FLASH_CUTE_HOST_DEVICE SplitWork work(SplitSequence const& s, int count = 1) const {
    BlockRange const blocks = visited(s);
    int const length = blocks.end - blocks.begin;
    int64_t const tiles = int64_t(VarlenOrder::m_blocks(s)) * int(packs_of_all.value) * count;
    return {tiles * length, tiles, tiles > 0 ? length : 0};
  }
  // Of a split, and of a sequence that is not cut, at most; where tiles have several splits, the latter
  // alone. kMayFold: may they?
  template <bool kMayFold = true>
  FLASH_CUTE_HOST_DEVICE int blocks_per_split(SplitWork const& of_all) const {
    bool const folds = kMayFold && lengths.folds;
    if (lengths.fixed_blocks > 0 && !folds) return lengths.fixed_blocks;
    int64_t const even = (of_all.blocks + lengths.blocks - 1) / lengths.blocks;
    int const share = int(smaller<int64_t>(even, 1 << 30));
    if (of_all.is_even() && of_all.tiles > 0) {  // and if they are many, they are whole
      int const longest = of_all.longest;
      if (folds) return lengths.most_whole_of_even(of_all.tiles, longest);
      return of_all.tiles < lengths.wanted_items() ? lengths.best_split(int(of_all.tiles), longest, share)
                                                   : longest;
    }
    if (folds) return lengths.most_whole(share);
    return larger(lengths.least_blocks, ceil_div(share, lengths.rounds));
  }
  // Where the first split starts.
  FLASH_CUTE_HOST_DEVICE int first_block(SplitSequence const& s) const {
    int const begin = visited(s).begin, fixed = lengths.fixed_blocks;
    return fixed > 0 ? begin / fixed * fixed : begin;
  }
  template <bool kMayFold = true>
  FLASH_CUTE_HOST_DEVICE int splits(SplitSequence const& s, int blocks_per_split) const {
    BlockRange const blocks = visited(s);
    if (kMayFold && lengths.folds) {
      if (blocks.end - blocks.begin <= blocks_per_split) return 1;
      blocks_per_split = lengths.fixed_blocks;
    }
    return ceil_div(blocks.end - first_block(s), blocks_per_split);
  }

  template <bool kMayFold = true>
  FLASH_CUTE_HOST_DEVICE SplitRecord record(int b, SplitSequence const& s, int first_block,
                                            int blocks_per_split) const {
    SplitRecord record{VarlenOrder::record(b, s, first_block),
                       s.k_first,
                       this->first_block(s),
                       visited(s).end,
                       blocks_per_split,
                       splits<kMayFold>(s, blocks_per_split)};
    if (kMayFold && lengths.folds) {
      record.blocks_per_split =
          record.splits > 1 ? lengths.fixed_blocks : record.block_end - record.block_begin;
    }
    record.k_begin = s.k_begin - s.k_first;
    return record;
  }

  FLASH_CUTE_HOST_DEVICE SplitTile tile(SplitRecord const& found, int index) const {
    unsigned const of_split = found.m_blocks * packs_of_all.value;
    int const split = int(unsigned(index - found.first_block * int(packs_of_all.value)) / of_split);
    int const begin = found.block_begin + split * found.blocks_per_split;
    return {VarlenOrder::tile(found, index - split * int(of_split)),
            found.k_first,
            begin,
            smaller(found.block_end, begin + found.blocks_per_split),
            found.splits > 1 ? index : SplitTile::kUnsplit,
            split,
            found.splits,
            int(of_split)};
  }

  // Of a prepared list or a uniform batch, of kernels that keep no list in shared memory.
  FLASH_CUTE_HOST_DEVICE int tiles() const {
    return is_uniform() ? capacity * int(packs_of_all.value) : VarlenOrder::tiles();
  }
  FLASH_CUTE_HOST_DEVICE int cut_blocks() const {
    return is_uniform() ? (uniform.splits > 1 ? capacity : 0) : header->cut_blocks;
  }
  FLASH_CUTE_HOST_DEVICE bool unwritten() const { return !is_uniform() && VarlenOrder::unwritten(); }
  FLASH_CUTE_HOST_DEVICE SplitTile operator()(int index) const {
    int const m_block = packs_of_all.quotient(index);
    return is_uniform() ? tile(uniform_record(m_block), index) : tile(prepared()[m_block], index);
  }
};

}  // namespace flash_cute
