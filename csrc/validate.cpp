#include "validate.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "backward.hpp"
#include "overlap.hpp"
#include "validate_scores.hpp"

namespace flash_cute {
namespace {

using torch::headeronly::DeviceType;

ElementType element_type(Operand const& q, AttentionOptions const& options) {
  bool const is_float = q.type == ScalarType::Float;
  require(is_float || q.type == ScalarType::Half || q.type == ScalarType::BFloat16,
          "q must have dtype torch.float16, torch.bfloat16 or torch.float32, got ", DtypeOf{q.type});
  return is_float && options.tf32 ? ElementType::tf32 : element_of(q.type);
}

std::optional<Family> family_named(std::optional<std::string> const& name) {
  if (!name) return std::nullopt;
  for (Family const family : {Family::sm80, Family::sm90}) {
    if (*name == name_of(family)) return family;
  }
  std::string shown = name->substr(0, 100);
  std::ranges::replace_if(shown, [](char letter) { return letter < ' ' || letter > '~'; }, '?');
  refuse("family is '", shown, "'; 'sm80', 'sm90' or None is accepted");
}

void require_limit(char const* name, std::optional<int64_t> limit) {
  require(!limit || *limit >= 0, name, " is ", limit.value_or(0),
          "; a number of keys >= 0, or None for no limit, is accepted");
}

// Kernels count tiles in int, and none has fewer than 32 rows; more fit into no GPU's memory, but expanded
// tensors may have them. Of k, heads of q count: a head of K and V may have tiles for each that it serves.
void require_rows(char const* name, int64_t entries, int64_t heads, int64_t seqlen) {
  constexpr int64_t kMaxRows = int64_t(1) << 35;
  int64_t const rows = entries * heads * seqlen;
  require(rows <= kMaxRows, name, " must have at most ", kMaxRows,
          " rows over the batch and the heads of q, got ", rows);
}

// Returns how many sequences there are: the offsets of packed ones say so, else q's batch.
int64_t batch_of(Operand const& q, LengthOperands const& lengths) {
  auto const& [cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, block_table] = lengths;
  for (auto const& length : lengths) {
    if (!length) continue;
    require_type(*length, ScalarType::Int);
    require_same_device(*length, q);
  }
  int64_t batch = 0;
  if (cu_seqlens_q) {
    require(cu_seqlens_q->sizes.size() == 1 && cu_seqlens_q->sizes[0] >= 1, "cu_seqlens_q has shape ",
            ShapeOf{cu_seqlens_q->sizes}, "; (batch + 1,) is accepted");
    batch = cu_seqlens_q->sizes[0] - 1;
  } else {
    batch = q.sizes[0];
  }
  for (auto const& length : lengths) {
    if (!length) continue;
    if (&length == &block_table) continue;
    int64_t const entries = &length == &cu_seqlens_k || &length == &cu_seqlens_q ? batch + 1 : batch;
    require_entries(*length, entries, batch);
  }
  if (block_table) {
    auto const& sizes = block_table->sizes;
    require(sizes.size() == 2 && sizes[0] == batch && sizes[1] >= 1,
            "block_table must have shape (batch, max_pages), where the batch is ", batch, ", got ",
            ShapeOf{sizes});
    require(sizes[1] == 1 || block_table->step == 1,
            "block_table must be contiguous in its last dimension, got stride ", block_table->step);
  }
  return batch;
}

// Keys and values have the type of q, or are codes of a cache.
void validate_types(Operand const& q, Operand const& k, Operand const& v, LengthOperands const& lengths) {
  if (!is_fp8(k.type)) {
    for (Operand const* operand : {&k, &v}) {
      require(operand->type == q.type, operand->name, " has dtype ", DtypeOf{operand->type}, " and q ",
              DtypeOf{q.type}, "; they must be the same");
    }
    return;
  }
  require(v.type == k.type, "v has dtype ", DtypeOf{v.type}, " and k ", DtypeOf{k.type},
          "; they must be the same");
  require(q.type != ScalarType::Float, "q must have dtype torch.float16 or torch.bfloat16 where k has dtype ",
          DtypeOf{k.type}, ", got ", DtypeOf{q.type});
  require(lengths[3] || lengths[5], "seqused_k or block_table must be given where k has dtype ",
          DtypeOf{k.type}, ", as caches alone may have it");
}

// Each entry of a batch lies without gaps; one may stand for all of them.
void require_contiguous_entries(Tensor const& ranges) {
  auto const sizes = ranges.sizes(), strides = ranges.strides();
  int64_t expected = 1;
  for (size_t dim = sizes.size(), last = sizes.size() == 5 ? 1 : 0; dim-- > last;) {
    require(sizes[dim] <= 1 || strides[dim] == expected,
            "ranges must be contiguous in its last dimensions, got stride ", strides[dim], " in dimension ",
            dim);
    expected *= sizes[dim];
  }
}

}  // namespace

AttentionProblem validate(AttentionArguments const& arguments) {
  auto const& [cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, block_table] = arguments.lengths;
  std::optional<Tensor> const* const given[] = {&cu_seqlens_q, &cu_seqlens_k, &seqused_q,
                                                &seqused_k,    &leftpad_k,    &block_table};
  LengthOperands lengths;
  for (size_t index = 0; index < lengths.size(); ++index) {
    if (!*given[index]) continue;
    lengths[index].emplace(operand(kLengthNames[index], **given[index]));
  }
  Operand const q = operand("q", arguments.q), k = operand("k", arguments.k), v = operand("v", arguments.v);
  std::optional<Operand> ranges;
  if (arguments.ranges) ranges.emplace(operand("ranges", *arguments.ranges));
  std::optional<Tensor> const* const given_scores[] = {&arguments.mask, &arguments.bias,
                                                       &arguments.alibi_slopes, &arguments.dropout_seed};
  ScoreOperands scores;
  for (size_t index = 0; index < scores.size(); ++index) {
    if (*given_scores[index]) scores[index].emplace(operand(kScoreNames[index], **given_scores[index]));
  }
  std::optional<Tensor> const* const given_scales[] = {&arguments.k_scale, &arguments.v_scale};
  ScaleOperands scales;
  for (size_t index = 0; index < scales.size(); ++index) {
    if (*given_scales[index]) scales[index].emplace(operand(kScaleNames[index], **given_scales[index]));
  }
  AttentionProblem const problem = validate(q, k, v, arguments.options, lengths, ranges, scores, scales);
  require_stored(q, arguments.q);
  require_stored(k, arguments.k);
  require_stored(v, arguments.v);
  for (size_t index = 0; index < lengths.size(); ++index) {
    if (lengths[index]) require_stored(*lengths[index], **given[index]);
  }
  for (size_t index = 0; index < scores.size(); ++index) {
    if (scores[index]) require_stored(*scores[index], **given_scores[index]);
  }
  for (size_t index = 0; index < scales.size(); ++index) {
    if (scales[index]) require_stored(*scales[index], **given_scales[index]);
  }
  if (ranges && arguments.ranges->numel() > 0) {
    require_contiguous_entries(*arguments.ranges);
    require_stored(*ranges, *arguments.ranges);
  }
  if (arguments.out) {
    auto const& [mask, bias, alibi_slopes, dropout_seed] = scores;
    Operand const out = operand("out", *arguments.out);
    validate_out(q, v, out);
    require_stored(out, *arguments.out);
    require_memory_of_its_own({&out, &*arguments.out},
                              {{&q, &arguments.q},
                               {&k, &arguments.k},
                               {&v, &arguments.v},
                               {mask ? &*mask : nullptr, mask ? &*arguments.mask : nullptr},
                               {bias ? &*bias : nullptr, bias ? &*arguments.bias : nullptr}});
  }
  if (arguments.sinks) {
    Operand const sinks = operand("sinks", *arguments.sinks);
    validate_sinks(q, sinks);
    require_stored(sinks, *arguments.sinks);
  }
  if (problem.cached) {
    require_readable_cache(k, arguments.k.strides(), arguments.k.const_data_ptr());
    require_readable_cache(v, arguments.v.strides(), arguments.v.const_data_ptr());
  }
  return problem;
}

AttentionProblem validate(Operand const& q, Operand const& k, Operand const& v,
                          AttentionOptions const& options, LengthOperands const& lengths,
                          std::optional<Operand> const& ranges, ScoreOperands const& scores,
                          ScaleOperands const& scales) {
  require(lengths[0] || !lengths[1], "cu_seqlens_k is given without cu_seqlens_q");
  bool const packed = lengths[0].has_value(), paged = lengths[5].has_value();
  // Beside packed queries keys may be a cache of (batch, heads, capacity, head_dim), as those of 8 bits are.
  bool const fp8 = is_fp8(k.type), cached = paged || fp8 || (packed && k.sizes.size() == 4);
  size_t const dims = packed ? 3 : 4, dims_k = cached ? 4 : dims;
  for (Operand const* operand : {&q, &k, &v}) {
    char const* const accepted =
        operand != &q && paged    ? "4, (pages, heads, page_size, head_dim), are accepted with block_table"
        : operand == &q && packed ? "3, (total, heads, head_dim), are accepted with cu_seqlens_q"
        : operand != &q && fp8    ? "4, (batch, heads, capacity, head_dim), are accepted of 8 bits each"
        : packed ? "3, (total, heads, head_dim), or 4, (batch, heads, capacity, head_dim), are "
                   "accepted with cu_seqlens_q"
                 : "4, (batch, heads, seqlen, head_dim), are accepted";
    require(operand->sizes.size() == (operand == &q ? dims : dims_k), operand->name, " has ",
            operand->sizes.size(), " dimensions; ", accepted);
  }
  require(!cached || !lengths[1],
          "cu_seqlens_k must be None where k is a cache of 4 dimensions; seqused_k has its "
          "lengths");
  ElementType const element = element_type(q, options);
  validate_types(q, k, v, lengths);
  for (Operand const* operand : {&k, &v}) require_same_device(*operand, q);

  auto const &sizes_q = q.sizes, &sizes_k = k.sizes, &sizes_v = v.sizes;
  require_alike_but_for_the_last(v, k);
  int64_t const head_dim = sizes_q[dims - 1], head_dim_v = sizes_v[dims_k - 1];
  require(packed || cached || sizes_k[0] == sizes_q[0], "k has batch ", sizes_k[0], " and q ", sizes_q[0],
          "; they must be the same");
  require(sizes_k[dims_k - 1] == head_dim, "k has head_dim ", sizes_k[dims_k - 1], " and q ", head_dim,
          "; they must be the same");
  require(head_dim >= 1 && head_dim <= kMaxHeadDim, "head_dim is ", head_dim, "; 1 to ", kMaxHeadDim,
          " are accepted");
  require(head_dim_v >= 1 && head_dim_v <= kMaxHeadDim, "head_dim of v is ", head_dim_v, "; 1 to ",
          kMaxHeadDim, " are accepted");
  require(sizes_q[1] == sizes_k[1] || (sizes_k[1] > 0 && sizes_q[1] % sizes_k[1] == 0), "q has ", sizes_q[1],
          " heads and k ", sizes_k[1], "; the heads of q must be a multiple of those of k");
  int const rows = packed ? 0 : 2, rows_k = cached ? 2 : rows;
  require(sizes_q[rows] <= kMaxLength, "q has ", packed ? "total " : "seqlen ", sizes_q[rows], "; at most ",
          kMaxLength, " is accepted");
  require(sizes_k[rows_k] <= kMaxLength, "k has ", packed && !cached ? "total " : "seqlen ", sizes_k[rows_k],
          "; at most ", kMaxLength, " is accepted");
  int64_t const batch = batch_of(q, lengths);
  int64_t seqlen_k = sizes_k[rows_k];
  if (paged) {
    require(sizes_k[0] >= 1 && sizes_k[2] >= 1, "k must have at least one page and one row in it, got shape ",
            ShapeOf{sizes_k});
    require(sizes_k[0] <= kMaxLength, "k must have at most ", kMaxLength, " pages, got ", sizes_k[0]);
    int64_t const width = lengths[5]->sizes[1];
    require(width <= kMaxLength / seqlen_k, "block_table must name at most ", kMaxLength,
            " keys of a sequence, got ", width, " pages of ", seqlen_k);
    seqlen_k *= width;
  } else if (cached) {
    require(sizes_k[0] == batch, "k has batch ", sizes_k[0], packed ? " and cu_seqlens_q " : " and q ", batch,
            "; they must be the same");
  }
  require(!options.batch_invariant || q.device.type() != DeviceType::CPU,
          "batch_invariant must be False on the CPU, got True");
  if (ranges) validate_ranges(q, *ranges, batch, packed, options);
  for (int64_t const width : {head_dim, head_dim_v}) {
    require(!cached || width % 8 == 0, "head_dim of a cache must be a multiple of 8, got ", width);
    require(!fp8 || width % kRowAlignment == 0, "head_dim must be a multiple of ", kRowAlignment,
            " where k has dtype ", DtypeOf{k.type}, ", got ", width);
  }
  for (auto const& scale : scales) {
    if (scale) validate_scale(*scale, k, batch, sizes_k[1]);
  }
  require(batch * sizes_q[1] <= kMaxLength, "q has ", batch * sizes_q[1], " (batch, head) pairs; at most ",
          kMaxLength, " are accepted");
  require_rows("q", packed ? 1 : batch, sizes_q[1], sizes_q[rows]);

  double const scale = options.softmax_scale.value_or(1.0 / std::sqrt(double(head_dim)));
  require_scale("softmax_scale", scale);
  require_scale("bias_scale", options.bias_scale);
  require_limit("window's left limit", options.window_left);
  require_limit("window's right limit", options.window_right);
  std::optional<Family> const family = family_named(options.family);
  require(!family || q.device.type() != DeviceType::CPU, "family is '", options.family.value_or(""),
          "', but q is on the CPU; None is accepted there");

  ProblemShape const shape{int(batch),    int(sizes_q[1]), int(sizes_k[1]), int(sizes_q[rows]),
                           int(seqlen_k), int(head_dim),   int(head_dim_v)};
  auto const& [mask, bias, alibi_slopes, dropout_seed] = scores;
  if (mask) validate_mask(q, *mask, lengths, shape);
  if (bias) validate_bias(q, k, *bias, lengths, shape, options);
  if (alibi_slopes) validate_alibi_slopes(q, *alibi_slopes, shape);

  return {
      .shape = shape,
      .element = element,
      .softmax_scale = float(scale),
      .window_left = options.window_left,
      .window_right = options.causal ? std::optional<int64_t>(0) : options.window_right,
      .family = family,
      .packed = packed,
      .varlen = std::any_of(lengths.begin(), lengths.end(), [](auto const& l) { return l.has_value(); }),
      .cached = cached,
      .pages = paged ? int(sizes_k[0]) : 0,
      .page_size = paged ? int(sizes_k[2]) : 0,
      .is_fp8 = fp8,
      .batch_invariant = options.batch_invariant,
      .ranges = ranges ? int(ranges->sizes[ranges->sizes.size() - 2]) : 0,
      .pair_mask = mask ? pair_mask_of(*mask, shape) : PairMaskParams{},
      .scores = {.scale = float(scale),
                 .softcap = softcap_of(options),
                 .has_slopes = alibi_slopes.has_value(),
                 .bias_scale = float(options.bias_scale),
                 .bias = {.given = bias.has_value()},
                 .dropout = {.keep = dropout_keep_of(q, k, lengths, cached, options, dropout_seed)}},
  };
}

void validate_scale(Operand const& scale, Operand const& k_cache, int64_t batch, int64_t heads_kv) {
  require(is_fp8(k_cache.type), scale.name, " must be None where ", k_cache.name, " has dtype ",
          DtypeOf{k_cache.type}, ", got a tensor");
  require_type(scale, ScalarType::Float);
  require_same_device(scale, k_cache);
  auto const& sizes = scale.sizes;
  bool const fits = sizes.empty() || (sizes.back() == heads_kv &&
                                      (sizes.size() == 1 || (sizes.size() == 2 && sizes[0] == batch)));
  require(fits, scale.name, " must have shape (), (heads_kv,) or (batch, heads_kv), here (), (", heads_kv,
          ",) or (", batch, ", ", heads_kv, "), got ", ShapeOf{sizes});
}

SizesOfOut::SizesOfOut(Operand const& q, Operand const& v) : count_(q.sizes.size()) {
  std::ranges::copy(q.sizes, sizes_.begin());
  sizes_[count_ - 1] = v.sizes.back();
}

void validate_out(Operand const& q, Operand const& v, Operand const& out) {
  SizesOfOut const expected(q, v);
  require(std::ranges::equal(out.sizes, expected.get()), "out has shape ", ShapeOf{out.sizes}, "; ",
          ShapeOf{expected.get()}, ", as q has shape ", ShapeOf{q.sizes}, " and v ", ShapeOf{v.sizes},
          ", is accepted");
  require_type(out, q.type);
  require_same_device(out, q);
}

void validate_sinks(Operand const& q, Operand const& sinks) {
  int64_t const heads = q.sizes[1];
  require(sinks.sizes.size() == 1 && sinks.sizes[0] == heads, "sinks must have shape (heads_q,), here (",
          heads, ",), got ", ShapeOf{sinks.sizes});
  require(sinks.type == ScalarType::Float || sinks.type == q.type,
          "sinks must have dtype torch.float32 or that of q, ", DtypeOf{q.type}, ", got ",
          DtypeOf{sinks.type});
  require(sinks.device == q.device, "sinks must be on device ", name_of(q.device), ", as q is, got ",
          name_of(sinks.device));
}

AttentionProblem validate(BackwardArguments const& arguments) {
  AttentionProblem const problem = validate(arguments.attention);
  require(!problem.cached, "there are no gradients through a cache");
  validate_keys_of_backward(problem);
  BackwardOperands operands{operand("out", arguments.out), operand("lse", arguments.lse)};
  if (arguments.dout) operands[2].emplace(operand("dout", *arguments.dout));
  if (arguments.dlse) operands[3].emplace(operand("dlse", *arguments.dlse));
  validate_backward(operand("q", arguments.attention.q), operand("v", arguments.attention.v), problem.packed,
                    operands);
  require_stored(*operands[0], arguments.out);
  require_stored(*operands[1], arguments.lse);
  if (arguments.dout) require_stored(*operands[2], *arguments.dout);
  if (arguments.dlse) require_stored(*operands[3], *arguments.dlse);
  return problem;
}

AttentionProblem validate_bias_gradient(BackwardArguments const& arguments) {
  require(arguments.attention.bias.has_value(), "bias is None; a tensor is accepted");
  AttentionProblem const problem = validate(arguments);
  ProblemShape const& of = problem.shape;
  std::array<int64_t, 4> const pairs{of.batch, of.heads_q, of.seqlen_q, of.seqlen_k};
  auto const sizes = arguments.attention.bias->sizes();
  require(!arguments.needs_dv || std::ranges::count(pairs, 0) > 0 || std::ranges::equal(sizes, pairs),
          "bias has shape ", ShapeOf{sizes}, "; ", ShapeOf{pairs}, " is accepted where needs_dv is True");
  return problem;
}

AttentionProblem validate_weights(BackwardArguments const& arguments) {
  AttentionProblem const problem = validate(arguments.attention);
  validate_keys_of_backward(problem);
  Operand const lse = operand("lse", arguments.lse);
  validate_results(operand("q", arguments.attention.q), operand("v", arguments.attention.v), problem.packed,
                   {std::nullopt, lse});
  require_stored(lse, arguments.lse);
  return problem;
}

void validate_keys_of_backward(AttentionProblem const& problem) {
  require(!problem.is_fp8, "k must have the dtype of q but in a forward, got one of 8 bits");
  ProblemShape const& shape = problem.shape;
  require_rows("k", problem.packed ? 1 : shape.batch, shape.heads_q, shape.seqlen_k);
}

void validate_backward(Operand const& q, Operand const& v, bool packed, BackwardOperands const& operands) {
  require(operands[2] || operands[3], "neither dout nor dlse is given; at least one of them is needed");
  validate_results(q, v, packed, operands);
}

void validate_results(Operand const& q, Operand const& v, bool packed, BackwardOperands const& operands) {
  auto const& sizes = q.sizes;
  std::array<int64_t, 3> rows{sizes[0], sizes[1], sizes[2]};
  if (packed) rows = {sizes[1], sizes[0]};
  IntHeaderOnlyArrayRef const sizes_of_lse(rows.data(), packed ? 2 : 3);
  SizesOfOut const sizes_of_out(q, v);
  for (size_t index = 0; index < operands.size(); ++index) {
    if (!operands[index]) continue;
    Operand const& operand = *operands[index];
    bool const is_lse = index % 2 == 1;
    auto const expected = is_lse ? sizes_of_lse : sizes_of_out.get();
    ScalarType const type = is_lse ? ScalarType::Float : q.type;
    require(std::ranges::equal(operand.sizes, expected), operand.name, " has shape ", ShapeOf{operand.sizes},
            "; ", ShapeOf{expected}, ", as q has shape ", ShapeOf{sizes}, ", is accepted");
    require_type(operand, type);
    require_same_device(operand, q);
  }
}

}  // namespace flash_cute
