// The operators of append_kv: schemas and checks. The CPU's kernel is in flash_cute/_cpu/append_kv.py.
#include "append.hpp"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <vector>

#include "overlap.hpp"

namespace flash_cute {
namespace {

using MaybeTensor = std::optional<Tensor>;
using MaybeSizes = std::optional<std::vector<int64_t>>;
using Part = AppendOperand;

constexpr char const* kNames[] = {"k",           "v",         "k_cache",    "v_cache", "cache_seqlens",
                                  "block_table", "slots",     "cu_seqlens", "q",       "rotary_cos",
                                  "rotary_sin",  "positions", "k_scale",    "v_scale"};
static_assert(std::size(kNames) == size_t(Part::count));

template <auto function>
auto boxed(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, MaybeTensor cache_seqlens,
           MaybeTensor block_table, MaybeTensor slots, MaybeTensor cu_seqlens, MaybeTensor q,
           MaybeTensor rotary_cos, MaybeTensor rotary_sin, bool rotary_interleaved, MaybeTensor positions,
           MaybeTensor k_scale, MaybeTensor v_scale) {
  return function({k, v, k_cache, v_cache, cache_seqlens, block_table, slots, cu_seqlens, q, rotary_cos,
                   rotary_sin, positions, rotary_interleaved, k_scale, v_scale});
}

// The CPU's kernel itself is Python's, which calls these checks.
void check(AppendArguments const& arguments) { validate(arguments); }

// The checks of a call by what is known of its tensors while it is traced: sizes, and of those that are
// given, in this order, dtypes, devices and strides of the last dimension.
void check_traced(std::vector<ScalarType> dtypes, std::vector<Device> devices, std::vector<int64_t> steps,
                  std::vector<int64_t> k, std::vector<int64_t> v, std::vector<int64_t> k_cache,
                  std::vector<int64_t> v_cache, MaybeSizes cache_seqlens, MaybeSizes block_table,
                  MaybeSizes slots, MaybeSizes cu_seqlens, MaybeSizes q, MaybeSizes rotary_cos,
                  MaybeSizes rotary_sin, MaybeSizes positions, MaybeSizes k_scale, MaybeSizes v_scale) {
  MaybeSizes const sizes[] = {k,          v, k_cache,    v_cache,    cache_seqlens, block_table, slots,
                              cu_seqlens, q, rotary_cos, rotary_sin, positions,     k_scale,     v_scale};
  AppendOperands operands;
  size_t next = 0;
  for (size_t i = 0; i < operands.size(); ++i) {
    if (!sizes[i]) continue;
    operands[i].emplace(Operand{kNames[i], *sizes[i], dtypes.at(next), devices.at(next), steps.at(next)});
    ++next;
  }
  validate_append(operands);
}

void require_contiguous_in_last(Operand const& operand) {
  require(operand.sizes.back() <= 1 || operand.step == 1, operand.name,
          " must be contiguous in its last dimension, got stride ", operand.step);
}

// Is it a table of rotations for rows of this type and size? Returns how many columns are rotated.
int rotary_dim(Operand const& cos, Operand const& sin, Operand const& k) {
  require(cos.type == k.type || cos.type == ScalarType::Float, "rotary_cos has dtype ", DtypeOf{cos.type},
          "; that of k, ", DtypeOf{k.type}, ", or torch.float32 is accepted");
  require_type(sin, cos.type);
  require(cos.sizes.size() == 2 && cos.sizes[0] >= 1, "rotary_cos has shape ", ShapeOf{cos.sizes},
          "; (positions, rotary_dim / 2), with one position at least, is accepted");
  require(std::ranges::equal(cos.sizes, sin.sizes), "rotary_sin has shape ", ShapeOf{sin.sizes},
          " and rotary_cos ", ShapeOf{cos.sizes}, "; they must be the same");
  int64_t const dim = 2 * cos.sizes[1], head_dim = k.sizes.back();
  require(dim >= 16 && dim % 16 == 0 && dim <= head_dim, "rotary_cos has ", cos.sizes[1],
          " columns; a multiple of 8, and at most half of head_dim, which is ", head_dim, ", is accepted");
  return int(dim);
}

}  // namespace

AppendProblem validate_append(AppendOperands const& operands) {
  auto given = [&](Part part) -> std::optional<Operand> const& { return operands[size_t(part)]; };
  Operand const &k = *given(Part::k), &v = *given(Part::v), &k_cache = *given(Part::k_cache),
                &v_cache = *given(Part::v_cache);
  auto const &q = given(Part::q), &cos = given(Part::rotary_cos), &sin = given(Part::rotary_sin),
             &positions = given(Part::positions), &slots = given(Part::slots),
             &table = given(Part::block_table), &cu_seqlens = given(Part::cu_seqlens),
             &cache_seqlens = given(Part::cache_seqlens);
  for (Part const part : {Part::cache_seqlens, Part::block_table, Part::cu_seqlens}) {
    require(!slots || !given(part), kNames[size_t(part)], " must be None with slots, which take its place");
  }
  bool const packed = slots || cu_seqlens;

  require(k.type == ScalarType::Half || k.type == ScalarType::BFloat16 || k.type == ScalarType::Float,
          "k has dtype ", DtypeOf{k.type}, "; torch.float16, torch.bfloat16 and torch.float32 are accepted");
  bool const fp8 = is_fp8(k_cache.type);
  if (fp8) {
    require(v_cache.type == k_cache.type, "v_cache has dtype ", DtypeOf{v_cache.type}, " and k_cache ",
            DtypeOf{k_cache.type}, "; they must be the same");
  }
  for (Part const part : {Part::v, Part::k_cache, Part::v_cache, Part::q}) {
    if (!given(part) || (fp8 && (part == Part::k_cache || part == Part::v_cache))) continue;
    require(given(part)->type == k.type, kNames[size_t(part)], " has dtype ", DtypeOf{given(part)->type},
            " and k ", DtypeOf{k.type}, "; they must be the same");
  }
  for (auto const& operand : operands) {
    if (operand) require_same_device(*operand, k);
  }
  char const* const accepted = packed ? "3, (total, heads, head_dim), are accepted with cu_seqlens or slots"
                                      : "4, (batch, heads, rows, head_dim), are accepted";
  for (Part const part : {Part::k, Part::q}) {
    if (!given(part)) continue;
    require(given(part)->sizes.size() == (packed ? 3 : 4), kNames[size_t(part)], " has ",
            given(part)->sizes.size(), " dimensions; ", accepted);
  }
  require(k_cache.sizes.size() == 4, "k_cache has ", k_cache.sizes.size(), " dimensions; 4, ",
          table || slots ? "(pages, heads, page_size, head_dim)" : "(batch, heads, capacity, head_dim)",
          ", are accepted");
  require_alike_but_for_the_last(v, k);
  require_alike_but_for_the_last(v_cache, k_cache);

  size_t const rows = packed ? 0 : 2;  // dimension of k and q
  int64_t const head_dim = k.sizes.back(), head_dim_v = v.sizes.back(), heads = k.sizes[1];
  require(k_cache.sizes[1] == heads, "k_cache has ", k_cache.sizes[1], " heads and k ", heads,
          "; they must be the same");
  require(k_cache.sizes[3] == head_dim, "k_cache has head_dim ", k_cache.sizes[3], " and k ", head_dim,
          "; they must be the same");
  require(v_cache.sizes[3] == head_dim_v, "v_cache has head_dim ", v_cache.sizes[3], " and v ", head_dim_v,
          "; they must be the same");
  for (int64_t const width : {head_dim, head_dim_v}) {
    require(width % 8 == 0, "head_dim of a cache must be a multiple of 8, got ", width);
    require(!fp8 || width % kRowAlignment == 0, "head_dim must be a multiple of ", kRowAlignment,
            " where k_cache has dtype ", DtypeOf{k_cache.type}, ", got ", width);
  }
  if (cu_seqlens) {
    require_type(*cu_seqlens, ScalarType::Int);
    require(cu_seqlens->sizes.size() == 1 && cu_seqlens->sizes[0] >= 1, "cu_seqlens has shape ",
            ShapeOf{cu_seqlens->sizes}, "; (batch + 1,) is accepted");
    require_contiguous_in_last(*cu_seqlens);
  }
  int64_t const batch = cu_seqlens ? cu_seqlens->sizes[0] - 1 : packed ? 0 : k.sizes[0];
  if (q) {
    require(q->sizes.back() == head_dim, "q has head_dim ", q->sizes.back(), " and k ", head_dim,
            "; they must be the same");
    require(packed || q->sizes[0] == batch, "q has batch ", q->sizes[0], " and k ", batch,
            "; they must be the same");
    require((!packed && !positions) || q->sizes[rows] == k.sizes[rows], "q has ", q->sizes[rows],
            " rows and k ", k.sizes[rows], "; they must be the same ",
            packed ? "where rows are packed" : "where positions are given");
    require(cos.has_value(), "q is given without rotary_cos; nothing would be done with it");
  }

  for (Part const part : {Part::k_scale, Part::v_scale}) {
    if (!given(part)) continue;
    require(!slots || given(part)->sizes.size() < 2, kNames[size_t(part)],
            " must have shape () or (heads_kv,) with slots, got ", ShapeOf{given(part)->sizes});
    validate_scale(*given(part), k_cache, batch, heads);
  }
  if (cache_seqlens) {
    require_type(*cache_seqlens, ScalarType::Int);
    require_entries(*cache_seqlens, batch, batch);
  }
  if (slots) {
    require_type(*slots, ScalarType::Long);
    require(slots->sizes.size() == 1, "slots has shape ", ShapeOf{slots->sizes}, "; (tokens,) is accepted");
    require(slots->sizes[0] <= k.sizes[0], "slots has ", slots->sizes[0], " entries and k ", k.sizes[0],
            " rows; no more entries than rows are accepted");
    require_contiguous_in_last(*slots);
  }
  int64_t pages = k_cache.sizes[0], width = 1;
  if (table) {
    require_type(*table, ScalarType::Int);
    require(table->sizes.size() == 2 && table->sizes[0] == batch && table->sizes[1] >= 1,
            "block_table must have shape (batch, max_pages), where the batch is ", batch, ", got ",
            ShapeOf{table->sizes});
    require_contiguous_in_last(*table);
    width = table->sizes[1];
  }
  int64_t const page_size = k_cache.sizes[2];
  if (table || slots) {
    require(pages >= 1 && page_size >= 1, "k_cache must have at least one page and one row in it, got shape ",
            ShapeOf{k_cache.sizes});
  } else {
    require(pages == batch, "k_cache has batch ", pages, " and ", packed ? "cu_seqlens " : "k ", batch,
            "; they must be the same");
  }
  require(
      pages <= kMaxLength && page_size <= kMaxLength && width <= kMaxLength / larger<int64_t>(1, page_size),
      "k_cache must have at most ", kMaxLength, " pages and rows of a sequence, got shape ",
      ShapeOf{k_cache.sizes});

  int64_t const entries = packed ? 1 : batch, rows_k = k.sizes[rows], rows_q = q ? q->sizes[rows] : 0;
  require(packed || rows_k <= width * page_size, "k must have at most as many rows as ",
          table ? "a sequence's pages" : "k_cache", ", which is ", width * page_size, ", got ", rows_k);
  require(entries * larger(rows_q, rows_k) <= kMaxLength, "k and q must have at most ", kMaxLength,
          " rows over the batch, got ", entries * larger(rows_q, rows_k));
  int64_t const elements = (heads * 2 + (q ? q->sizes[1] : 0)) * larger(head_dim, head_dim_v);
  require(elements <= kMaxLength, "the heads of q, k and v, all as wide as the widest, must have at most ",
          kMaxLength, " elements of a row, got ", elements);

  require(cos.has_value() == sin.has_value(), cos ? "rotary_sin" : "rotary_cos",
          " is None and the other of the two is not; both or neither are accepted");
  require(!positions || cos, "positions is given without rotary_cos; nothing would be done with it");
  require(!slots || !cos || positions, "positions must be given where slots and rotary_cos are");
  if (positions) {
    require_type(*positions, ScalarType::Long);
    std::array<int64_t, 2> const expected{entries, rows_k};
    IntHeaderOnlyArrayRef const of_tokens(expected.data() + packed, 2 - packed);
    require(std::ranges::equal(positions->sizes, of_tokens), "positions has shape ",
            ShapeOf{positions->sizes}, "; ", ShapeOf{of_tokens}, ", one for each row of k, is accepted");
    require_contiguous_in_last(*positions);
  }

  return {.entries = int(entries),
          .rows_q = int(rows_q),
          .rows_k = int(rows_k),
          .heads_q = q ? int(q->sizes[1]) : 0,
          .heads_kv = int(heads),
          .head_dim = int(head_dim),
          .head_dim_v = int(head_dim_v),
          .sequences = int(batch),
          .pages = int(pages),
          .page_size = int(page_size),
          .width = int(width),
          .rotary_dim = cos ? rotary_dim(*cos, *sin, k) : 0,
          .rotary_length = cos ? cos->sizes[0] : 0,
          .element = element_of(k.type),
          .rotary_is_fp32 = cos && cos->type == ScalarType::Float,
          .is_fp8 = fp8};
}

AppendProblem validate(AppendArguments const& arguments) {
  auto const& [k, v, k_cache, v_cache, cache_seqlens, block_table, slots, cu_seqlens, q, cos, sin, positions,
               interleaved, k_scale, v_scale] = arguments;
  std::optional<Tensor> const tensors[] = {k,           v,         k_cache,    v_cache, cache_seqlens,
                                           block_table, slots,     cu_seqlens, q,       cos,
                                           sin,         positions, k_scale,    v_scale};
  AppendOperands operands;
  for (size_t i = 0; i < operands.size(); ++i) {
    if (tensors[i]) operands[i].emplace(operand(kNames[i], *tensors[i]));
  }
  AppendProblem const problem = validate_append(operands);
  for (size_t i = 0; i < operands.size(); ++i) {
    if (operands[i]) require_stored(*operands[i], *tensors[i]);
  }
  auto named = [&](Part part) {
    size_t const i = size_t(part);
    return operands[i] ? NamedTensor{&*operands[i], &*tensors[i]} : NamedTensor{};
  };
  NamedTensor const caches[] = {named(Part::k_cache), named(Part::v_cache)};
  for (NamedTensor const& cache : caches) {
    require_readable_cache(*cache.operand, cache.tensor->strides(), cache.tensor->const_data_ptr());
    require_memory_of_its_own(cache, {named(Part::k), named(Part::v), named(Part::q)});
  }
  // Where a table or slots say which pages are used, those of V may lie between those of K: transformers'
  // caches are views of one buffer that are shifted by a page. A page of V is compared with that of K alone.
  bool const in_pages = block_table || slots;
  std::array<int64_t, 4> sizes_k, sizes_v;
  std::ranges::copy(k_cache.sizes(), sizes_k.begin());
  std::ranges::copy(v_cache.sizes(), sizes_v.begin());
  if (in_pages) sizes_k[0] = sizes_v[0] = 1;
  Operand of_k = *caches[0].operand, of_v = *caches[1].operand;
  of_k.sizes = {sizes_k.data(), sizes_k.size()};
  of_v.sizes = {sizes_v.data(), sizes_v.size()};
  require_memory_of_its_own({&of_v, &v_cache}, {{&of_k, &k_cache}});
  return problem;
}

#ifndef FLASH_CUTE_WITH_CUDA

Tensor append_kv_cuda(AppendArguments const&) { refuse_gpu("k"); }

#endif

}  // namespace flash_cute

#define FLASH_CUTE_APPEND(cache_k, cache_v)                                                         \
  "Tensor k, Tensor v, " cache_k " k_cache, " cache_v                                               \
  " v_cache, Tensor? cache_seqlens=None, *, Tensor? block_table=None, Tensor? slots=None, Tensor? " \
  "cu_seqlens=None, Tensor? q=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, bool "        \
  "rotary_interleaved=False, Tensor? positions=None, Tensor? k_scale=None, Tensor? v_scale=None) "

STABLE_TORCH_LIBRARY_FRAGMENT(flash_cute, library) {
  library.def("append_kv(" FLASH_CUTE_APPEND("Tensor(a!)", "Tensor(b!)") "-> Tensor");
  library.def("_append_kv_cpu(" FLASH_CUTE_APPEND("Tensor", "Tensor") "-> ()");
  library.def(
      "_append_kv_check(ScalarType[] dtypes, Device[] devices, int[] steps, int[] k, int[] v, int[] k_cache, "
      "int[] v_cache, int[]? cache_seqlens=None, int[]? block_table=None, int[]? slots=None, int[]? "
      "cu_seqlens=None, int[]? q=None, int[]? rotary_cos=None, int[]? rotary_sin=None, int[]? "
      "positions=None, int[]? k_scale=None, int[]? v_scale=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, library) {
  library.impl("append_kv", TORCH_BOX(&flash_cute::boxed<flash_cute::append_kv_cuda>));
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CPU, library) {
  library.impl("_append_kv_cpu", TORCH_BOX(&flash_cute::boxed<flash_cute::check>));
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, library) {
  library.impl("_append_kv_check", TORCH_BOX(&flash_cute::check_traced));
}
