"""Masks as users write them: any window on any lengths, and the several ways to say the same."""

from __future__ import annotations

import pytest
import torch
from support.cases import DTYPES, SHAPES, Mask, Shape, make_inputs
from support.tolerance import assert_attention

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

EXAMPLES = 150 if torch.cuda.is_available() else 25
lengths = st.integers(1, 400)
limits = st.none() | st.integers(0, 420)


@given(lengths, lengths, st.booleans(), st.none() | st.tuples(limits, limits), st.sampled_from([32, 64, 128]))
@settings(deadline=None, max_examples=EXAMPLES)
def test_any_window_on_any_lengths(kernel, seqlen_q, seqlen_k, causal, window, head_dim):
    mask = Mask(causal, window)
    q, k, v = make_inputs(Shape(1, 4, 2, seqlen_q, seqlen_k, head_dim), torch.bfloat16, kernel.device)
    assert_attention(kernel.forward(q, k, v, **mask.options), q, k, v, mask)


SAME = {
    "causal is a right limit of zero": (Mask(causal=True), Mask(window=(None, 0))),
    "causal overrides the right limit": (Mask(causal=True, window=(30, 7)), Mask(window=(30, 0))),
    "a wide window is full": (Mask(), Mask(window=(10_000, 2**62))),
    "an unlimited window is full": (Mask(), Mask(window=(None, None))),
    "one number is both limits": (Mask(window=20), Mask(window=(20, 20))),
}


@pytest.mark.parametrize("shape", [SHAPES[name] for name in ("no_tile_divides", "more_keys", "more_queries")])
@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_same_mask_same_bits(kernel, one, other, shape):
    q, k, v = make_inputs(shape, torch.bfloat16, kernel.device)
    for a, b in zip(
        kernel.forward(q, k, v, **one.options), kernel.forward(q, k, v, **other.options), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_window_of_zero_is_the_values_themselves(kernel, dtype):
    """Each query sees one key only, its own on the diagonal: the output is that key's value, bit by bit."""
    q, k, v = make_inputs(Shape(2, 4, 4, 201, 201, 64), dtype, kernel.device)
    assert torch.equal(kernel.forward(q, k, v, window=0)[0], v)
