// What a thread block of the forward works on: a tile of queries, by itself or with what there is to know of
// its sequence.
#pragma once

namespace flash_cute {

constexpr int kNoTile = -1;  // the m_begin of a tile after the last one

// A tile of a batch whose sequences all have the lengths that the shape says.
struct TileCoord {
  int m_begin;  // its first query
  int head;     // its first query head
  int head_kv;  // the head of K and V that it reads
  int batch;
};

// A tile of a batch of unequal lengths, with the lengths of its sequence, and where its rows begin.
struct alignas(16) VarlenTile {
  int m_begin, head, head_kv, batch;  // as of TileCoord
  int q_begin, seqlen_q;              // the sequence's first row of Q, and how many of its queries count
  int k_begin, seqlen_k;              // the first key that some query can see, and how many follow
};

// A tile of queries, and the split of its sequence's keys that it computes. Keys are counted from the first
// one of the sequence, whether a query can see it or not.
struct SplitTile : VarlenTile {
  int k_first;                 // the first key that some query can see; seqlen_k keys follow
  int block_begin, block_end;  // blocks of keys of the part
  int slot;                    // of the partial result; kUnsplit where the tile has all of its keys
  int split, splits;           // of the sequence
  int tiles_per_split;         // slots from one split of a tile to the next
  static constexpr int kUnsplit = -1;
};

}  // namespace flash_cute
