// Checks what a call has beside a window that hides pairs of queries and keys or changes their scores.
#pragma once

#include "validate.hpp"

namespace flash_cute {

void validate_ranges(Operand const& q, Operand const& ranges, int64_t batch, bool packed,
                     AttentionOptions const& options);
void validate_mask(Operand const& q, Operand const& mask, LengthOperands const& lengths,
                   ProblemShape const& shape);
PairMaskParams pair_mask_of(Operand const& mask, ProblemShape const& shape);
void validate_bias(Operand const& q, Operand const& k, Operand const& bias, LengthOperands const& lengths,
                   ProblemShape const& shape, AttentionOptions const& options);
void validate_alibi_slopes(Operand const& q, Operand const& slopes, ProblemShape const& shape);
float softcap_of(AttentionOptions const& options);
// Returns how many of DropoutParams::kAll weights are kept.
int dropout_keep_of(Operand const& q, Operand const& k, LengthOperands const& lengths, bool cached,
                    AttentionOptions const& options, std::optional<Operand> const& seed);

}  // namespace flash_cute
