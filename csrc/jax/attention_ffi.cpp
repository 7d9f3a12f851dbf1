// Attention as XLA calls it.
#include "ffi.hpp"

namespace flash_cute {
namespace {

// (..., seqlen, heads, head_dim), contiguous; what vmap maps over comes before the batch.
struct Sizes {
  int batch, seqlen, heads, head_dim;

  explicit Sizes(Buffer const& buffer) {
    auto const sizes = buffer.dimensions();
    size_t const dims = sizes.size();
    int64_t entries = 1;  // no overflow: no dimension is 0, and the buffer lies in memory
    for (size_t dim = 0; dim + 3 < dims; ++dim) entries *= sizes[dim];
    at_most(kMaxLength, entries * sizes[dims - 2], "(batch, head) pairs");
    batch = int(entries);
    seqlen = at_most(kMaxLength, sizes[dims - 3], "rows in a sequence");
    heads = int(sizes[dims - 2]);
    head_dim = int(sizes[dims - 1]);
  }
  TensorView view(void* data) const {
    int64_t const row = int64_t(heads) * head_dim;
    return {data, batch > 1 ? seqlen * row : 0, head_dim, row};
  }
};

TensorView view(Buffer const& buffer) { return Sizes(buffer).view(buffer.untyped_data()); }

// (..., seqlen_q, count, 2), of each entry of the batch; empty: they were not given.
RangeParams ranges_of(Buffer const& buffer) {
  if (buffer.element_count() == 0) return {};
  auto const sizes = buffer.dimensions();
  size_t const dims = sizes.size();
  int64_t const count = sizes[dims - 2];
  return {.given = static_cast<int const*>(buffer.untyped_data()),
          .entry_stride = sizes[dims - 3] * count * 2,
          .count = int(count)};
}

// (..., entries, heads, rows, columns), each of them all or one: their strides, 0 where one stands for all.
struct OfPairs {
  int64_t entries, heads, rows, columns, entry_stride, head_stride, row_stride;

  explicit OfPairs(Buffer const& buffer) {
    auto const sizes = buffer.dimensions();
    size_t const dims = sizes.size();
    heads = sizes[dims - 3];
    rows = sizes[dims - 2];
    columns = sizes[dims - 1];
    entries = int64_t(buffer.element_count()) / (heads * rows * columns);
    row_stride = rows > 1 ? columns : 0;
    head_stride = heads > 1 ? rows * columns : 0;
    entry_stride = entries > 1 ? heads * rows * columns : 0;
  }
};

// A mask's bits; empty: it was not given.
PairMaskParams pair_mask_of(Buffer const& bits, ProblemShape const& shape) {
  if (bits.element_count() == 0) return {};
  OfPairs const of(bits);
  return {.data = static_cast<uint8_t const*>(bits.untyped_data()),
          .given = true,
          .is_packed = true,
          .entries = int(of.entries),
          .heads = int(of.heads),
          .rows = int(of.rows),
          .columns = shape.seqlen_k,
          .entry_stride = of.entry_stride,
          .head_stride = of.head_stride,
          .row_stride = of.row_stride,
          .byte_stride = 1};
}

// A bias, with rows of a multiple of 16 bytes; empty: it was not given.
BiasParams bias_of(Buffer const& bias, ProblemShape const& shape) {
  if (bias.element_count() == 0) return {};
  OfPairs const of(bias);
  return {.data = bias.untyped_data(),
          .given = true,
          .sequences_of_entry = int(shape.batch / of.entries),
          .rows = shape.seqlen_q,
          .columns = shape.seqlen_k,
          .entry_stride = of.entry_stride,
          .head_stride = of.head_stride,
          .row_stride = of.row_stride,
          .key_stride = of.columns > 1};
}

// What hides pairs, changes scores and drops weights. seed: the words of two int64; empty: nothing is
// dropped.
struct Scores {
  Buffer mask, bias, seed;
  float softcap, bias_scale;
  int64_t keep;

  void put(AttentionProblem& problem) const {
    problem.pair_mask = pair_mask_of(mask, problem.shape);
    problem.scores = {
        .scale = problem.softmax_scale,
        .softcap = softcap,
        .bias_scale = bias_scale,
        .bias = bias_of(bias, problem.shape),
        .dropout = {.seed = static_cast<int64_t const*>(seed.untyped_data()), .keep = int(keep)}};
  }
};

std::optional<int64_t> limit(int64_t value) { return value < 0 ? std::nullopt : std::optional(value); }

AttentionProblem problem_of(Buffer const& q, Buffer const& k, Buffer const& v, bool has_lengths, int ranges,
                            float scale, int64_t left, int64_t right, bool tf32) {
  Sizes const of_q(q), of_k(k), of_v(v);
  ElementType const element = element_of(q);
  return {
      .shape = {of_q.batch, of_q.heads, of_k.heads, of_q.seqlen, of_k.seqlen, of_q.head_dim, of_v.head_dim},
      .element = element == ElementType::fp32 && tf32 ? ElementType::tf32 : element,
      .softmax_scale = scale,
      .window_left = limit(left),
      .window_right = limit(right),
      .family = std::nullopt,
      .packed = false,
      .varlen = has_lengths,
      .ranges = ranges};
}

LengthParams lengths_of(Buffer const& seqused_q, Buffer const& seqused_k, Buffer const& leftpad_k) {
  return {.seqused_q = lengths(seqused_q), .seqused_k = lengths(seqused_k), .leftpad_k = lengths(leftpad_k)};
}

bool any(LengthParams const& lengths) { return lengths.seqused_q || lengths.seqused_k || lengths.leftpad_k; }

constexpr char kAttention[] = "flash_cute.jax.attention";

// No rows or keys are cut off here: flash_cute/jax does so, where a mask asks for it.
template <class Call>
void require_whole(Call const& call) {
  require(call.launches && call.unreachable() == 0, "some keys are seen by no query");
}

// takes: does the kernel?
template <class Call>
bool are_bias_tiles(Call const& call, bool takes) {
  BiasParams const& bias = call.params.scores.bias;
  LengthParams const& lengths = call.params.lengths;
  return takes && bias.given && bias.key_stride == 1 &&
         has_bias_tiles(call.problem, lengths.seqused_q || lengths.seqused_k, lengths.leftpad_k != nullptr);
}

ffi::Error forward(cudaStream_t stream, int device, Buffer q, Buffer k, Buffer v, Buffer seqused_q,
                   Buffer seqused_k, Buffer leftpad_k, Buffer ranges_buffer, Buffer mask, Buffer bias,
                   Buffer seed, Result out, Result lse, Result workspace, float scale, int64_t left,
                   int64_t right, bool tf32, float softcap, float bias_scale, int64_t keep) {
  return guarded(kAttention, [&] {
    LengthParams const lengths = lengths_of(seqused_q, seqused_k, leftpad_k);
    RangeParams const ranges = ranges_of(ranges_buffer);
    AttentionProblem problem = problem_of(q, k, v, any(lengths), ranges.count, scale, left, right, tf32);
    Scores{mask, bias, seed, softcap, bias_scale, keep}.put(problem);
    ForwardCall call = plan_forward_call(problem, lengths, current_gpu(device));
    require_whole(call);
    ForwardParams& params = call.params;
    params.scores.bias.is_tiled =
        are_bias_tiles(call, call.launch.kernel.takes_bias_tiles(call.kernel.family, call.kernel.bucket));
    params.q = view(q);
    params.k = view(k);
    params.v = view(v);
    params.out = view(*out);
    params.lse = static_cast<float*>(lse->untyped_data());
    params.ranges = ranges;
    call.run(workspace_of(workspace, call.launch.workspace.bytes), stream);
  });
}

// What a backward reads, and the gradient of a bias.
struct BackwardOperands {
  Buffer dout, dlse, q, k, v, out, lse;
  RangeParams ranges;

  void put(BackwardParams& params) const {
    params.q = view(q);
    params.k = view(k);
    params.v = view(v);
    params.out = view(out);
    params.dout = view(dout);
    params.lse = static_cast<float const*>(lse.untyped_data());
    params.dlse = dlse.element_count() > 0 ? static_cast<float const*>(dlse.untyped_data()) : nullptr;
    params.ranges = ranges;
  }
};

ffi::Error backward(cudaStream_t stream, int device, Buffer dout, Buffer dlse, Buffer q, Buffer k, Buffer v,
                    Buffer out, Buffer lse, Buffer seqused_q, Buffer seqused_k, Buffer leftpad_k,
                    Buffer ranges, Buffer mask, Buffer bias, Buffer seed, Result dq, Result dk, Result dv,
                    Result workspace, float scale, int64_t left, int64_t right, bool tf32, float softcap,
                    float bias_scale, int64_t keep, bool deterministic) {
  return guarded(kAttention, [&] {
    LengthParams const lengths = lengths_of(seqused_q, seqused_k, leftpad_k);
    BackwardOperands const operands{dout, dlse, q, k, v, out, lse, ranges_of(ranges)};
    AttentionProblem problem =
        problem_of(q, k, v, any(lengths), operands.ranges.count, scale, left, right, tf32);
    Scores{mask, bias, seed, softcap, bias_scale, keep}.put(problem);
    BackwardCall call = plan_backward_call(problem, lengths, current_gpu(device), true, true, deterministic);
    require_whole(call);
    BackwardParams& params = call.params;
    params.scores.bias.is_tiled = are_bias_tiles(call, call.launch.kernel.tile.has_pair_tiles);
    operands.put(params);
    params.dq = view(*dq);
    params.dk = view(*dk);
    params.dv = view(*dv);
    call.run(workspace_of(workspace, call.launch.workspace.bytes), stream);
  });
}

ffi::Error bias_gradient(cudaStream_t stream, int device, Buffer dout, Buffer dlse, Buffer q, Buffer k,
                         Buffer v, Buffer out, Buffer lse, Buffer seqused_q, Buffer seqused_k,
                         Buffer leftpad_k, Buffer ranges, Buffer mask, Buffer bias, Buffer seed, Result dbias,
                         Result workspace, float scale, int64_t left, int64_t right, bool tf32, float softcap,
                         float bias_scale, int64_t keep) {
  return guarded(kAttention, [&] {
    LengthParams const lengths = lengths_of(seqused_q, seqused_k, leftpad_k);
    BackwardOperands const operands{dout, dlse, q, k, v, out, lse, ranges_of(ranges)};
    AttentionProblem problem =
        problem_of(q, k, v, any(lengths), operands.ranges.count, scale, left, right, tf32);
    Scores{mask, bias, seed, softcap, bias_scale, keep}.put(problem);
    OfPairs const of(*dbias);  // its rows are not as wide as those of the bias
    PairShape const shape{int(of.entries), int(of.heads), int(of.rows), int(of.columns)};
    PairCall call = plan_pair_call(problem, lengths, current_gpu(device), shape);
    require(call.launches, "there are no pairs");
    operands.put(call.params.call);
    call.params.sums = dbias->untyped_data();
    call.run(workspace_of(workspace, call.launch.workspace.bytes), stream);
  });
}

}  // namespace

// Bytes of the workspaces, asked for while a call is traced; 0 where the call itself will fail and say why.
// call: 0 forward, 1 backward, 2 the gradient of a bias.
extern "C" int64_t flash_cute_jax_workspace(int call, int element, int batch, int heads_q, int heads_kv,
                                            int seqlen_q, int seqlen_k, int head_dim, int head_dim_v,
                                            int64_t left, int64_t right, bool has_lengths, bool deterministic,
                                            int ranges, int mask_entries, int mask_heads, int mask_rows,
                                            int bias_entries, int bias_heads, int bias_rows, int bias_columns,
                                            bool has_softcap, int keep) {
  AttentionProblem const problem{
      .shape = {batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v},
      .element = ElementType(element),
      .softmax_scale = 1.f,
      .window_left = limit(left),
      .window_right = limit(right),
      .family = std::nullopt,
      .packed = false,
      .varlen = has_lengths,
      .ranges = ranges,
      .pair_mask = {.given = mask_entries > 0,
                    .is_packed = true,
                    .entries = mask_entries,
                    .heads = mask_heads,
                    .rows = mask_rows,
                    .columns = seqlen_k},
      .scores = {
          .softcap = float(has_softcap), .bias = {.given = bias_entries > 0}, .dropout = {.keep = keep}}};
  try {
    if (call == 0) return forward_workspace(problem);
    if (call == 1) return backward_workspace(problem, deterministic);
    PairShape const shape{bias_entries, bias_heads, bias_rows, bias_columns};
    return pair_workspace(problem, shape);
  } catch (std::exception const&) {
    return 0;
  }
}

namespace {

// What all handlers have: first, after their own arguments, and after their results.
auto begin() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>(); }
template <class Binding>
auto with_masks(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<Buffer>()   // seqused_q
      .template Arg<Buffer>()   // seqused_k
      .template Arg<Buffer>()   // leftpad_k
      .template Arg<Buffer>()   // ranges
      .template Arg<Buffer>()   // mask
      .template Arg<Buffer>()   // bias
      .template Arg<Buffer>();  // seed
}
template <class Binding>
auto with_options(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Ret<Buffer>()  // workspace
      .template Attr<float>("scale")
      .template Attr<int64_t>("left")
      .template Attr<int64_t>("right")
      .template Attr<bool>("tf32")
      .template Attr<float>("softcap")
      .template Attr<float>("bias_scale")
      .template Attr<int64_t>("keep");
}
// Of handlers of gradients.
auto begin_gradients() {
  return with_masks(begin()
                        .Arg<Buffer>()    // dout
                        .Arg<Buffer>()    // dlse
                        .Arg<Buffer>()    // q
                        .Arg<Buffer>()    // k
                        .Arg<Buffer>()    // v
                        .Arg<Buffer>()    // out
                        .Arg<Buffer>());  // lse
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(flash_cute_jax_forward, forward,
                              with_options(with_masks(begin()
                                                          .Arg<Buffer>()   // q
                                                          .Arg<Buffer>()   // k
                                                          .Arg<Buffer>())  // v
                                               .Ret<Buffer>()              // out
                                               .Ret<Buffer>()),            // lse
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(flash_cute_jax_backward, backward,
                              with_options(begin_gradients()
                                               .Ret<Buffer>()   // dq
                                               .Ret<Buffer>()   // dk
                                               .Ret<Buffer>())  // dv
                                  .Attr<bool>("deterministic"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(flash_cute_jax_bias_gradient, bias_gradient,
                              with_options(begin_gradients().Ret<Buffer>()),  // dbias
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace flash_cute
