"""Which queries see which keys, for torch's arrays and JAX's alike, and without either."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


def visible(rows, keys, seqlen_q, seqlen_k, left=None, right=None, skipped=0):
    """Booleans: which of `rows` see which of `keys`; arrays of whole numbers that broadcast.

    Query i sees key j iff i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right, and
    skipped <= j < seqlen_k. left and right: None is unlimited; the lengths and skipped may be arrays, too.
    """
    own = rows + (seqlen_k - seqlen_q)
    seen = (keys >= skipped) & (keys < seqlen_k)
    if left is not None:
        seen = seen & (keys >= own - left)
    if right is not None:
        seen = seen & (keys <= own + right)
    return seen


def in_ranges(ranges, keys):
    """Booleans, (..., keys): which of `keys` lie in one of each query's ranges, (..., R, 2), [start, end)."""
    return ((keys >= ranges[..., :1]) & (keys < ranges[..., 1:])).any(-2)


class Window(NamedTuple):
    """The mask of one sequence in numbers: limits are at most those that reach every key."""

    seqlen_q: int
    seqlen_k: int
    left: int
    right: int

    @classmethod
    def of(cls, seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> Window:
        unlimited = seqlen_q + seqlen_k
        limits = (unlimited if limit is None else min(limit, unlimited) for limit in (left, right))
        return cls(seqlen_q, seqlen_k, *limits)

    @property
    def shift(self) -> int:
        return self.seqlen_k - self.seqlen_q

    @property
    def blind(self) -> int:
        """How many queries, the first ones, see no key."""
        return min(max(0, -self.shift - self.right), self.seqlen_q)

    @property
    def causal(self) -> bool:
        """Is it PyTorch's causal mask, which is aligned top left?"""
        return self.left >= self.seqlen_k - 1 and self.right == 0 and self.shift == 0

    @property
    def full(self) -> bool:
        return self.left >= self.seqlen_k - 1 and self.right >= self.seqlen_q - 1

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key see each other."""

        def up_to(limit: int) -> int:
            """Those whose key is at most `limit` after the query's own: the last query has seqlen_k + limit,
            each before it one less, cut to the keys that there are.
            """
            last = self.seqlen_k + limit
            return _staircase(last, self.seqlen_k) - _staircase(last - self.seqlen_q, self.seqlen_k)

        return up_to(self.right) - up_to(-self.left - 1)

    def blocks(self, step: int) -> Iterator[tuple[slice, slice]]:
        """Rows that are not blind, `step` at a time, and the keys that they see."""
        for begin in range(self.blind, self.seqlen_q, step):
            rows = slice(begin, min(begin + step, self.seqlen_q))
            first, last = begin + self.shift - self.left, rows.stop + self.shift + self.right
            yield rows, slice(max(0, first), min(self.seqlen_k, last))


def _staircase(last: int, most: int) -> int:
    """The sum of 1, 2, ..., last, each cut to `most`."""
    last = max(last, 0)
    rising = min(last, most)
    return rising * (rising + 1) // 2 + (last - rising) * most
