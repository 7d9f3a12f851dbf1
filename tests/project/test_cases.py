"""The tables of cases: every two values meet, also where some are refused; and what is expected of a case."""

from __future__ import annotations

import random
from dataclasses import asdict
from itertools import combinations, product

import pytest
import torch
from support import table
from support.cases import BUCKETS, MASKS, Shape, each_pair, make_gradients, make_inputs
from support.expected import Sequence
from support.scores import Given

from flash_cute import reference


@pytest.mark.parametrize("sizes", [(16, 9, 2, 2), (2, 2, 2), (3, 1), (40, 2, 2), (5, 12, 4)], ids=str)
def test_every_two_values_of_two_axes_meet(sizes):
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    rows = each_pair(*axes)
    for one, other in combinations(range(len(axes)), 2):
        assert {(row[one], row[other]) for row in rows} == set(product(axes[one], axes[other]))
    largest, second, *_ = sorted(map(len, axes), reverse=True)
    assert len(rows) <= largest * second + largest
    others = each_pair(*axes, shuffle=random.Random(1))
    assert others == each_pair(*axes, shuffle=random.Random(1))
    assert sorted(others) != sorted(rows) or len(rows) == len(list(product(*axes)))


@pytest.mark.parametrize("kind", sorted(table.KINDS_OF_CASES))
@pytest.mark.parametrize("family", [None, "sm80", "sm90"])
def test_refused_values_meet_in_refused_cases_and_all_others_in_others(family, kind):
    """Each rule has a case that nothing else refuses."""
    named = {axis: [*values] for axis, values in table.axes(family, kind).items()}
    met, alone = {True: set(), False: set()}, set()
    for case in table.drawn(family, kind):
        values = {axis: asdict(case)[axis] for axis in named}
        sentences = table.refusals(asdict(case), family)
        met[bool(sentences)].update(combinations(values.items(), 2))
        alone.update(sentences if len(sentences) == 1 else ())
    for one, other in combinations(named, 2):
        for pair in product(product([one], named[one]), product([other], named[other])):
            assert pair in met[bool(table.refusals(dict(pair), family))], pair
    for refused, sentence, where in table.REFUSALS:
        if where in ("", family, "gpu" if family else None) and refused.keys() <= named.keys():
            there_are = all({*names}.intersection(named[axis]) for axis, names in refused.items())
            assert sentence in alone or not there_are, sentence


@pytest.mark.parametrize("kind", sorted(table.KINDS_OF_CASES))
@pytest.mark.parametrize("family", [None, "sm80", "sm90"])
def test_random_cases(family, kind):
    """As many as asked for, the same of the same seed; each value in some, of which none is refused."""
    cases = table.crossed(family, kind, 1500, "7")
    assert len(set(cases)) == 1500
    assert cases[:20] == table.crossed(family, kind, 20, "7") != table.crossed(family, kind, 20, "8")
    assert not any(table.refusals(asdict(case), family) for case in cases)
    for axis, values in table.axes(family, kind).items():
        assert {getattr(case, axis) for case in cases} == {*values}


@pytest.mark.parametrize("kind", ["forward_case", "gradient_case"])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_widths_of_v_meet_in_every_two_buckets(family, kind):
    """In cases that are not refused, and Hopper's pair as it is compiled."""
    cases = [case for case in table.drawn(family, kind) if not table.refusals(asdict(case), family)]
    widths = {(case.widths["q"], case.widths["v"]) for case in cases}
    assert {tuple(min(b for b in BUCKETS if b >= width) for width in pair) for pair in widths} == set(
        product(BUCKETS, repeat=2)
    )
    assert (192, 128) in widths


@pytest.mark.parametrize("width_v", ["8", "57", table.AS_Q, "96"])
@pytest.mark.parametrize("layout", ["contiguous", "mixed", "padded_columns", table.SHARED])
def test_behind_the_narrower_width_there_is_no_number(layout, width_v):
    """Or, where k and v share their columns, those of the other."""
    call = table.make_call(table.Case(layout=layout, width_v=width_v), torch.device("cpu"))
    widths = {"q": 64, "k": 64, "v": 64 if width_v == table.AS_Q else int(width_v)}
    for name, width in widths.items():
        tensor, most = getattr(call, name), max(widths.values())
        assert tensor.shape[-1] == width
        if layout == table.SHARED and name != "q":
            other = call.v if name == "k" else call.k
            assert tensor.data_ptr() == other.data_ptr()
            assert tensor.stride() == other.stride()
        else:
            behind = tensor.as_strided((*tensor.shape[:3], most), tensor.stride())[..., width:]
            assert behind.isnan().all()


CHANGES = {
    "nothing": {},
    "pairs": {"pairs": "pairs"},
    "bits of keys": {"pairs": "bits of keys"},
    "no pair": {"pairs": "no pair"},
    "bias": {"bias": "some -inf"},
    "lowest": {"bias": "lowest"},
    "alibi": {"alibi": "of sequences and heads"},
    "softcap": {"softcap": "1.5"},
    "dropout": {"dropout": "0.5"},
    "all": {"pairs": "bits", "bias": "some -inf", "alibi": "of heads", "softcap": "1.5", "dropout": "0.1"},
}


@pytest.mark.parametrize("head_dim_v", [None, 10, 24])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_what_is_expected_is_the_reference(changes, mask, head_dim_v):
    """Which was written by itself."""
    q, k, v = make_inputs(Shape(1, 4, 2, 9, 13, 16, head_dim_v), torch.float32, "cpu", "contiguous")
    dout, dlse = make_gradients(q, head_dim_v=head_dim_v)
    sequence = Sequence(q[0], k[0], v[0], mask.visible(9, 13), None, 0.3)
    case, generator = table.Case(**changes), torch.Generator().manual_seed(1)
    scores = Given.of(case, (1, 4, 9, 13), [13], False, torch.float32, torch.device("cpu"), generator)
    sequence = scores.changed(sequence, 0, torch.arange(9))
    given = {"softmax_scale": 0.3, **mask.options, **scores.arguments()}
    found = *sequence.forward(torch.float64), *sequence.gradients(dout[0], dlse[0], torch.float64)
    right = [*reference.forward(q, k, v, **given), *reference.backward(q, k, v, dout, dlse, **given)]
    if "bias" in given:
        right.append(reference.bias_gradient(q, k, v, dout, dlse, **given))
    rounded = *sequence.rounded_forward(), *sequence.gradients_of_rounded_out(dout[0], dlse[0])
    assert len(found) == len(rounded) == len(right) + ("alibi_slopes" in given and "bias" not in given)
    for ours, theirs, close in zip(found, right, rounded, strict=False):
        torch.testing.assert_close(ours, theirs[0])
        # float32 has no room for the logarithm of a few keys beside its lowest numbers.
        torch.testing.assert_close(close.double(), ours, rtol=1e-4, atol=2e-5)


def test_a_sink_is_a_key_without_a_value():
    q, k, v = make_inputs(Shape(1, 4, 2, 9, 13, 16), torch.float32, "cpu", "contiguous")
    sees = torch.rand(9, 13) < 0.5
    sees[3] = False
    sinks = torch.tensor([0.5, -torch.inf, 2.0, -1.0])
    sequence = Sequence(q[0], k[0], v[0], sees, sinks, 0.3)
    scores = (q[0] @ k[0].repeat_interleave(2, 0).mT).double() * 0.3
    weights = scores.exp() * sees
    total = weights.sum(-1) + sinks.double().exp()[:, None]
    out = (weights / total.clamp(min=1e-300)[..., None]) @ v[0].double().repeat_interleave(2, 0)
    for found in (sequence.forward(torch.float64), sequence.rounded_forward()):
        torch.testing.assert_close(found[0].double(), out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[1].double(), total.log(), rtol=1e-4, atol=1e-5)
