// New keys and values into a cache, on each kind of device, behind one set of arguments.
#pragma once

#include <array>

#include "validate.hpp"

namespace flash_cute {

struct AppendArguments {
  // New rows, (batch, heads_kv, rows, head_dim); packed, with cu_seqlens or slots: (total, heads_kv,
  // head_dim). v, as v_cache, may have a head_dim of its own.
  Tensor k, v;
  Tensor k_cache, v_cache;  // (batch, heads_kv, capacity, head_dim), or pages with block_table or slots
  std::optional<Tensor> cache_seqlens, block_table, slots, cu_seqlens, q, rotary_cos, rotary_sin, positions;
  bool rotary_interleaved;
  std::optional<Tensor> k_scale, v_scale;  // of a cache of 8 bits, as in AttentionArguments
};

// Those of AppendArguments, in its order.
enum class AppendOperand {
  k,
  v,
  k_cache,
  v_cache,
  cache_seqlens,
  block_table,
  slots,
  cu_seqlens,
  q,
  rotary_cos,
  rotary_sin,
  positions,
  k_scale,
  v_scale,
  count
};
using AppendOperands = std::array<std::optional<Operand>, size_t(AppendOperand::count)>;

// What a call is, once it is known to make sense.
struct AppendProblem {
  int entries, rows_q, rows_k;  // packed: one entry
  int heads_q, heads_kv;
  int head_dim, head_dim_v;  // of q and k; of v
  int sequences;             // of the cache's lengths or table
  int pages, page_size;      // a cache without pages has one for each sequence
  int width;                 // pages of a sequence
  int rotary_dim;
  int64_t rotary_length;
  ElementType element;
  bool rotary_is_fp32;
  bool is_fp8;  // the cache

  int widest() const { return larger(head_dim, head_dim_v); }
  bool is_empty() const {
    return entries == 0 || larger(rows_q, rows_k) == 0 || heads_q + heads_kv == 0 || widest() == 0;
  }
};

// Throws if the call makes no sense. Values of lengths, places and positions are not looked at.
AppendProblem validate_append(AppendOperands const& operands);
AppendProblem validate(AppendArguments const& arguments);

// The rotated q, or an empty tensor where there is none.
Tensor append_kv_cuda(AppendArguments const& arguments);

}  // namespace flash_cute
