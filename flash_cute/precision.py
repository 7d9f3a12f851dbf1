"""How exact products of float32 are on a GPU: which argument asks for it, and what torch's setting says."""

from __future__ import annotations

import torch

from flash_cute.wording import OURS, shown

PRECISIONS = "highest", "high"


def is_tf32(precision: str | None, dtype: torch.dtype) -> bool:
    """Does a call with q of this dtype compute its products in TF32? 16-bit types have one precision."""
    if precision is not None and precision not in PRECISIONS:
        kind = ValueError if isinstance(precision, str) else TypeError
        raise kind(f"{OURS}precision must be 'highest', 'high' or None, got {shown(precision)}")
    return dtype is torch.float32 and (precision or of_matmuls()) != "highest"


def of_matmuls() -> str:
    """The precision of PyTorch's own products."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by torch.backends' newer names, of which that function knows nothing
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


# torch.compile can't trace the question, but compiles again where the answer has changed. This is what
# torch.compiler.assume_constant_result does, after an import that takes seconds.
of_matmuls._dynamo_marked_constant = True
