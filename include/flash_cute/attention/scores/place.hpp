// Where the pairs of a tile lie, for what depends on the numbers of a query and a key.
#pragma once

namespace flash_cute {

// Queries and keys are counted as the tile's mask counts them.
struct ScorePlace {
  int sequence, head;          // the number of the sequence, the first query head of the rows
  int diagonal;                // the key at which query 0 stands
  int queries;                 // that count
  int query_begin, key_begin;  // query 0 and key 0: their rows of the sequence, whether all count or not
};

}  // namespace flash_cute
