// What a thread block of the forward works on: a tile of queries, by itself or with what there is to know of
// its sequence.
#pragma once

namespace flash_cute {

constexpr int kNoTile = -1;  // the m_begin of a tile behind the last one

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

}  // namespace flash_cute
