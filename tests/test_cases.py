"""The tables of cases: what the CPU leaves out of a matrix is no pair of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from cases import each_pair


@pytest.mark.parametrize("sizes", [(16, 9, 2, 2), (2, 2, 2), (3, 1), (40, 2, 2), (5, 12, 4)], ids=str)
def test_every_two_values_of_two_axes_meet(sizes):
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    rows = each_pair(*axes)
    for one, other in combinations(range(len(axes)), 2):
        assert {(row[one], row[other]) for row in rows} == set(product(axes[one], axes[other]))
    largest, second, *_ = sorted(map(len, axes), reverse=True)
    assert len(rows) <= largest * second + largest
