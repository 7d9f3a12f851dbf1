#include "validate_scores.hpp"

#include <cmath>

#include "flash_cute/attention/mask/ranges.hpp"

namespace flash_cute {
namespace {

using torch::headeronly::DeviceType;

// Is one of a tensor's sizes, which may be 1 in place of what it stands for?
bool is_all_or_one(int64_t size, int64_t all) { return size == all || size == 1; }

}  // namespace

void validate_ranges(Operand const& q, Operand const& ranges, int64_t batch, bool packed,
                     AttentionOptions const& options) {
  require_type(ranges, ScalarType::Int);
  require_same_device(ranges, q);
  auto const& sizes = ranges.sizes;
  size_t const dims = packed ? 3 : 5;
  bool const fits = sizes.size() == dims && sizes[dims - 1] == 2 && sizes[dims - 2] >= 1 &&
                    sizes[dims - 2] <= kMaxRanges && sizes[dims - 3] == q.sizes[packed ? 0 : 2];
  if (packed) {
    require(fits, "ranges must have shape (total_q, R, 2) with R from 1 to ", kMaxRanges, ", here (",
            q.sizes[0], ", R, 2), got ", ShapeOf{sizes});
  } else {
    require(fits && (sizes[0] == 1 || sizes[0] == batch),
            "ranges must have shape (batch or 1, 1, seqlen_q, R, 2) with R from 1 to ", kMaxRanges,
            ", here (", batch, " or 1, 1, ", q.sizes[2], ", R, 2), got ", ShapeOf{sizes});
    require(sizes[1] == 1, "ranges must be alike for all heads, with 1 in dimension 1, got ", sizes[1]);
  }
  require(ranges.step == 1, "ranges must be contiguous in its last dimensions, got stride ", ranges.step);
  require(!options.batch_invariant, "ranges must be None with batch_invariant");
}

void validate_mask(Operand const& q, Operand const& mask, LengthOperands const& lengths,
                   ProblemShape const& shape) {
  require(!lengths[0], "mask must be None with cu_seqlens_q, got a tensor");
  bool const bits = mask.type == ScalarType::Byte;
  require(
      bits || mask.type == ScalarType::Bool, "mask has dtype ", DtypeOf{mask.type},
      "; torch.bool or, with 8 keys a byte, torch.uint8 is accepted, and numbers to add to scores are bias");
  require_same_device(mask, q);
  auto const& sizes = mask.sizes;
  int64_t const columns = bits ? ceil_div(shape.seqlen_k, 8) : shape.seqlen_k;
  bool const may_be_short = lengths[3] || lengths[5];  // seqused_k, block_table
  bool const fits = sizes.size() == 4 && is_all_or_one(sizes[0], shape.batch) &&
                    is_all_or_one(sizes[1], shape.heads_q) && is_all_or_one(sizes[2], shape.seqlen_q) &&
                    (sizes[3] == columns || (may_be_short && sizes[3] >= 1 && sizes[3] < columns));
  require(fits, "mask must have shape (batch or 1, heads_q or 1, seqlen_q or 1, ",
          may_be_short ? "1 to " : "", bits ? "seqlen_k / 8, rounded up" : "seqlen_k", "), here (",
          shape.batch, " or 1, ", shape.heads_q, " or 1, ", shape.seqlen_q, " or 1, ",
          may_be_short ? "1 to " : "", columns, "), got ", ShapeOf{sizes});
  require(q.device.type() == DeviceType::CPU || sizes[1] <= kMaxMaskHeads, "mask has ", sizes[1],
          " heads; 1, or at most ", kMaxMaskHeads, ", are accepted on a GPU");
}

PairMaskParams pair_mask_of(Operand const& mask, ProblemShape const& shape) {
  auto const& sizes = mask.sizes;
  bool const is_packed = mask.type == ScalarType::Byte;
  return {.given = true,
          .is_packed = is_packed,
          .entries = int(sizes[0]),
          .heads = int(sizes[1]),
          .rows = int(sizes[2]),
          .columns = int(smaller<int64_t>(shape.seqlen_k, is_packed ? 8 * sizes[3] : sizes[3]))};
}

void validate_bias(Operand const& q, Operand const& k, Operand const& bias, LengthOperands const& lengths,
                   ProblemShape const& shape, AttentionOptions const& options) {
  require(!lengths[0], "bias must be None with cu_seqlens_q, got a tensor");
  require(!lengths[5], "bias must be None with block_table, got a tensor");
  require(!options.batch_invariant, "bias must be None with batch_invariant, got a tensor");
  require(!is_fp8(k.type), "bias must be None where k has dtype ", DtypeOf{k.type}, ", got a tensor");
  require(bias.type == q.type, "bias must have the dtype of q, ", DtypeOf{q.type}, ", got ",
          DtypeOf{bias.type});
  require_same_device(bias, q);
  auto const& sizes = bias.sizes;
  auto divides = [](int64_t entries, int64_t batch) {
    return entries == batch || (entries > 0 && batch % entries == 0);
  };
  bool const fits = sizes.size() == 4 && divides(sizes[0], shape.batch) &&
                    is_all_or_one(sizes[1], shape.heads_q) && is_all_or_one(sizes[2], shape.seqlen_q) &&
                    is_all_or_one(sizes[3], shape.seqlen_k);
  require(fits,
          "bias must have shape (a divisor of batch, heads_q or 1, seqlen_q or 1, seqlen_k or 1), here (",
          "a divisor of ", shape.batch, ", ", shape.heads_q, " or 1, ", shape.seqlen_q, " or 1, ",
          shape.seqlen_k, " or 1), got ", ShapeOf{sizes});
}

void validate_alibi_slopes(Operand const& q, Operand const& slopes, ProblemShape const& shape) {
  require_type(slopes, ScalarType::Float);
  require_same_device(slopes, q);
  auto const& sizes = slopes.sizes;
  bool const fits = !sizes.empty() && sizes.back() == shape.heads_q &&
                    (sizes.size() == 1 || (sizes.size() == 2 && sizes[0] == shape.batch));
  require(fits, "alibi_slopes must have shape (heads_q,) or (batch, heads_q), here (", shape.heads_q,
          ",) or (", shape.batch, ", ", shape.heads_q, "), got ", ShapeOf{sizes});
}

float softcap_of(AttentionOptions const& options) {
  float const softcap = float(options.softcap);
  require(options.softcap == 0 || (softcap > 0 && std::isnormal(softcap)), "softcap is ", options.softcap,
          "; 0, for none, or a finite number > 0 is accepted");
  return softcap;
}

int dropout_keep_of(Operand const& q, Operand const& k, LengthOperands const& lengths, bool cached,
                    AttentionOptions const& options, std::optional<Operand> const& seed) {
  double const p = options.dropout_p;
  require(p >= 0 && p < 1, "dropout_p is ", p, "; a number from 0 to less than 1 is accepted");
  if (seed) {
    require_type(*seed, ScalarType::Long);
    require_same_device(*seed, q);
    require(seed->sizes.size() == 1 && seed->sizes[0] == 2, "dropout_seed must have shape (2,), got ",
            ShapeOf{seed->sizes});
  }
  if (p == 0) return DropoutParams::kAll;
  require(!lengths[5], "dropout_p must be 0 with block_table, got ", p);
  require(!is_fp8(k.type), "dropout_p must be 0 where k has dtype ", DtypeOf{k.type}, ", got ", p);
  require(!cached, "dropout_p must be 0 where k is a cache beside packed queries, got ", p);
  require(!options.batch_invariant, "dropout_p must be 0 with batch_invariant, got ", p);
  require(seed.has_value(), "dropout_seed is None; a tensor is accepted where dropout_p is ", p);
  int const keep = int(std::nearbyint(DropoutParams::kAll * (1 - p)));  // of a half to the even one
  require(keep > 0, "dropout_p is ", p, ", which keeps no weight, as one is kept with a multiple of 1 / ",
          DropoutParams::kAll, "; less than ", 1 - 0.5 / DropoutParams::kAll, " is accepted");
  return keep;
}

}  // namespace flash_cute
