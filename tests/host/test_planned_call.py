"""csrc/kernels/planned_call.cpp: which kernels take a call, and the workspace that holds it on any GPU."""

from __future__ import annotations

import pytest
from problems import given, settings, st

# Compute capability, multiprocessors and KiB of shared memory of a thread block.
HOPPER, SMALL_HOPPER, AMPERE, ADA = (90, 132, 227), (90, 78, 227), (80, 108, 163), (89, 128, 99)
GPUS = (HOPPER, SMALL_HOPPER, AMPERE, ADA, (86, 16, 99), (90, 144, 227), (80, 1, 163))

NO_CHANGES = ({}, {"keep": 4096}, {"softcap": 0.0}, {"slopes": False})
PAIRS = ({"ranges": 1}, {"ranges": 4}, {"mask": (1, 1, 1)}, {"mask": (2, 8, 500)})
SCORES = ({"softcap": 30.0}, {"slopes": True}, {"bias": True}, {"keep": 4095}, {"keep": 1})
SIZES = 2, 8, 2, 500, 700, 64, 64


@pytest.mark.parametrize("changes", NO_CHANGES, ids=str)
def test_what_changes_nothing_is_not_general(planned, changes):
    assert not planned.is_general(SIZES, changes)
    planned.build_without("general")
    try:
        assert planned.forward(SIZES, {}, changes, HOPPER)[0] == "sm90"
        assert planned.backward(SIZES, {}, changes, HOPPER, True)[0] == "sm90"
    finally:
        planned.build_without("")


@pytest.mark.parametrize("changes", PAIRS + SCORES, ids=str)
def test_what_hides_pairs_or_changes_scores_is_general(planned, changes):
    """It runs in general kernels and no others; and all keys stay, as each sequence has its own."""
    assert planned.is_general(SIZES, changes)
    unreachable = {"left": 10, "right": 0}
    for gpu in (HOPPER, ADA):
        assert planned.forward(SIZES, unreachable, {}, gpu)[4] == 190
        assert planned.forward(SIZES, unreachable, changes, gpu)[4] == 0
        assert planned.backward(SIZES, unreachable, changes, gpu, False)[2] == 0
    planned.build_without("plain")
    try:
        assert planned.forward(SIZES, {}, changes, HOPPER)[:2] == ("sm90", 64)
        assert planned.forward(SIZES, {}, changes, AMPERE)[:2] == ("sm80", 64)
        planned.build_without("general")
        kind = "ranges" if "ranges" in changes else "changed scores"
        for call, more in ((planned.forward, ()), (planned.backward, (False,))):
            with pytest.raises(
                RuntimeError, match=f"^flash_cute: this build has no .* kernel for {kind} with "
            ):
                call(SIZES, {}, changes, AMPERE, *more)
    finally:
        planned.build_without("")


@pytest.mark.parametrize("changes", PAIRS + SCORES, ids=str)
def test_gradients_of_general_calls_that_are_deterministic(planned, changes):
    """The Ampere family's kernels make them on Hopper, too, but not where Hopper's are asked for by name."""
    assert planned.backward(SIZES, {}, changes, HOPPER, False)[0] == "sm90"
    assert planned.backward(SIZES, {}, changes, HOPPER, True)[0] == "sm80"
    assert planned.backward(SIZES, {}, {}, HOPPER, True)[0] == "sm90"
    assert planned.backward(SIZES, {"family": "sm90"}, {}, HOPPER, True)[0] == "sm90"
    assert planned.backward(SIZES, {"family": "sm80"}, changes, HOPPER, True)[0] == "sm80"
    assert planned.backward(SIZES, {"family": "sm90"}, changes, HOPPER, False)[0] == "sm90"
    with pytest.raises(
        RuntimeError, match=r"^flash_cute: family must be 'sm80' or None where .*, got 'sm90'$"
    ):
        planned.backward(SIZES, {"family": "sm90"}, changes, HOPPER, True)


@pytest.mark.parametrize(
    ("head_dims", "plain", "general"),
    [
        ((64, 64), 64, 64),
        ((65, 65), 96, 128),
        ((96, 96), 96, 128),
        ((128, 40), 128, 128),
        ((160, 160), 192, 256),
        ((192, 128), 192, 256),
        ((256, 256), 256, 256),
    ],
)
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_head_dims_of_general_calls(planned, family, head_dims, plain, general):
    """There are fewer of them: the next larger kernel takes the others."""
    sizes, options = (*SIZES[:5], *head_dims), {"family": family}
    for changes in PAIRS + SCORES:
        assert planned.forward(sizes, options, changes, HOPPER)[1] == general
        assert planned.backward(sizes, options, changes, HOPPER, False)[1] == general
    assert planned.forward(sizes, options, {}, HOPPER)[1] == plain
    assert planned.backward(sizes, options, {}, HOPPER, False)[1] == plain


@pytest.mark.parametrize("changes", PAIRS + SCORES, ids=str)
@pytest.mark.parametrize("element", ["fp32", "tf32"])
def test_general_calls_of_float32(planned, element, changes):
    for gpu in (HOPPER, ADA):
        options = {"element": element}
        assert planned.forward(SIZES, options, changes, gpu)[:3] == ("sm80", 64, False)
        assert planned.backward(SIZES, options, changes, gpu, False)[:2] == ("sm80", 64)


@pytest.mark.parametrize("gpu", [HOPPER, AMPERE])
def test_batch_invariant_calls_are_cut(planned, gpu):
    """By whatever hides pairs or changes scores without a tile of its own."""
    for changes in ({}, *PAIRS, {"softcap": 30.0}, {"slopes": True}):
        assert planned.forward(SIZES, {"batch_invariant": True}, changes, gpu)[2]


@pytest.mark.parametrize("gpu", [HOPPER, AMPERE])
def test_a_mask_beside_lengths_has_bits_for_each_sequence(planned, gpu):
    """They are those of its own last keys, also where the mask is the same for all."""

    def workspaces(entries, **options):
        changes = {"mask": (entries, 1, SIZES[3])}
        forward = planned.forward(SIZES, options, changes, gpu)
        return forward[-1], planned.backward(SIZES, options, changes, gpu, False)[-1]

    bits = SIZES[3] * SIZES[4] // 8
    assert all(two - one >= bits for one, two in zip(workspaces(1), workspaces(SIZES[0]), strict=True))
    assert workspaces(1, varlen=True) == workspaces(SIZES[0], varlen=True)


@st.composite
def changed_scores(draw, batch, heads, rows):
    """Some changes that plans ask about."""
    changes = {}
    if draw(st.booleans()):
        changes["ranges"] = draw(st.integers(1, 4))
    if draw(st.booleans()):
        changes["mask"] = tuple(draw(st.sampled_from([1, most])) for most in (batch, heads, rows))
    for name, value in (("softcap", 20.0), ("slopes", True), ("bias", True), ("keep", 3686)):
        if draw(st.integers(0, 3)) == 0:
            changes[name] = value
    return changes


@st.composite
def calls(draw):
    heads_kv = draw(st.sampled_from([1, 2, 8]))
    heads = heads_kv * draw(st.sampled_from([1, 2, 4, 12]))
    few = st.integers(1, 64)
    sizes = (
        draw(st.integers(1, 5)),
        heads,
        heads_kv,
        draw(few | st.integers(1, 3000)),
        draw(few | st.integers(1, 9000)),
        *[draw(st.sampled_from([40, 64, 96, 128, 256]))] * 2,
    )
    options = {"element": draw(st.sampled_from(["bf16", "bf16", "tf32"])), "varlen": draw(st.booleans())}
    if draw(st.booleans()):
        options["right"] = 0
        options["left"] = draw(st.none() | st.integers(0, 500))
    return sizes, options, draw(changed_scores(sizes[0], heads, sizes[3]))


@settings(max_examples=30)
@given(calls(), st.integers(1, 3), st.booleans())
def test_a_workspace_for_any_gpu_holds_that_of_each(planned, call, times, deterministic):
    """As JAX asks for it: before it knows the GPU, and for a part of the batch, which may be many times as
    large."""
    sizes, options, changes = call
    larger = changes | {}
    if "mask" in changes and changes["mask"][0] > 1:
        larger["mask"] = (sizes[0] * times, *changes["mask"][1:])
    many = (sizes[0] * times, *sizes[1:])
    forward = times * planned.forward_workspace(sizes, options, changes)
    backward = times * planned.backward_workspace(sizes, options, changes, deterministic)
    needed = 163 if sizes[5] == 256 and options["element"] == "tf32" else 99  # KiB, by the backward
    for gpu in GPUS:
        assert planned.forward(many, options, larger, gpu)[-1] <= forward
        if gpu[2] >= needed:
            assert planned.backward(many, options, larger, gpu, deterministic)[-1] <= backward


def test_a_bias_of_more_blocks_than_are_counted(planned):
    """Kernels count the blocks of pairs that a number is added to in int: more are refused, not left out."""
    one = 1, 1, 1, 1
    assert planned.bias_gradient(SIZES, one, HOPPER) == 2 * 8 * 4 * 6
    assert planned.bias_gradient((1, 16, 16, 1 << 20, 1 << 20, 64, 64), one, HOPPER) == 1 << 30
    sentence = "^flash_cute: a number of bias is added to 2147483648 blocks of pairs; at most 1073741824 are"
    with pytest.raises(RuntimeError, match=sentence):
        planned.bias_gradient((1, 32, 32, 1 << 20, 1 << 20, 64, 64), one, HOPPER)
    assert planned.bias_gradient((1, 32, 32, 1 << 20, 1 << 20, 64, 64), (1, 32, 1, 1), HOPPER) == 1 << 26
