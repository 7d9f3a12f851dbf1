"""Backward calls of tests/sanitize.py, a part of them: every head dim, free and deterministic, dense, padded, packed."""
import itertools, os, sys
sys.path[:0] = [os.getcwd(), os.getcwd() + "/tests"]
import torch, flash_cute
import sanitize as S
from cases import *
from tolerance import assert_gradients, assert_ragged_gradients
n = 0; FAM = os.environ.get("FAM", "sm90")
for head_dim in (64, 96, 128, 192, 256):
    for det in (False, True):
        for mask in ("causal", "window_symmetric"):
            shape = Shape(1, 2, 1, 150, 201, head_dim) if mask == "causal" else Shape(1, 2, 1, 201, 50, head_dim - 8)
            inputs = make_inputs(shape, torch.bfloat16, "cpu", "padded_columns")
            on_gpu = {k: t.to("cuda") for k, t in zip("qkv", inputs)}
            given = make_gradients(inputs[0])
            assert_gradients(S.gradients(flash_cute.forward, on_gpu, given, MASKS[mask], FAM, det), *inputs, *given, MASKS[mask]); n += 1
    for packed, name, heads, mask, det in ((True, "unequal", (2, 1), "causal", False), (False, "used and left padding", (2, 2), "window_symmetric", True), (True, "some empty", (2, 1), "full", True), (False, "some empty", (2, 1), "causal", False)):
        batch = make_ragged(BATCHES[name], heads, head_dim, torch.bfloat16, "cpu", packed, "padded_columns")
        inputs = {k: t.to("cuda") for k, t in {"q": batch.q, "k": batch.k, "v": batch.v, **batch.lengths}.items()}
        given = make_ragged_gradients(batch)
        f = flash_cute.forward_varlen if packed else flash_cute.forward
        assert_ragged_gradients(S.gradients(f, inputs, given, MASKS[mask], FAM, det), batch, *given, MASKS[mask]); n += 1
print("calls", n)
