"""Attention with changed scores, and its gradients, on the CPU, by PyTorch's plain operators in float32.

Of one sequence at a time, whose tensors are (heads, rows, ...), and of so many of its queries that what is
computed on the way has a bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flash_cute import dropout
from flash_cute._cpu import key_ranges
from flash_cute._cpu.sequences import FLOAT
from flash_cute._cpu.windows import Window

_SCORES = 1 << 21  # of a block of queries, of all heads
_LARGEST, _HUGE = torch.finfo(torch.float32).max, 1e30
_COARSE = 2.0**12  # beyond it and its negative, float32 rounds to multiples of 1 / 2048


@dataclass(frozen=True)
class Scores:
    """What makes weights of q k^T beside the scale, the window and ranges: of a call, or of a sequence.

    Of a sequence mask and bias are (heads or 1, queries or 1, ...), slopes (heads,). Its keys are those that
    count: `first` ones before them do not. A mask's first column is key `covered`, counted with these.
    """

    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    seed: torch.Tensor | None = None
    softcap: float = 0.0
    bias_scale: float = 1.0
    keep: int = dropout.STEPS
    number: int = 0
    first: int = 0
    covered: int = 0

    @classmethod
    def of(
        cls, mask=None, bias=None, alibi_slopes=None, dropout_seed=None, softcap=0.0, bias_scale=1.0,
        dropout_p=0.0,
    ):  # fmt: skip
        """Of the operator's arguments, or None where they change nothing."""
        keep = dropout.keep_of(dropout_p) if dropout_p > 0 else dropout.STEPS
        found = cls(mask, bias, alibi_slopes, dropout_seed, float(softcap), float(bias_scale), keep)
        tensors = mask, bias, alibi_slopes
        changed = any(x is not None for x in tensors) or softcap > 0 or keep < dropout.STEPS
        return found if changed else None

    def of_sequence(self, number: int, batch: int, first: int, keys: int, room: int) -> Scores:
        """keys: how many count, behind `first` that do not; room: how many rows there are for all of them."""
        mask = None if self.mask is None else self.mask[number if len(self.mask) > 1 else 0]
        bias = None if self.bias is None else self.bias[number // (batch // len(self.bias))]
        slopes = self.slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[number]
        covered = 0
        if mask is not None:
            columns = mask.shape[-1]
            if mask.dtype == torch.uint8:
                columns = room if columns == -(-room // 8) else 8 * columns
            covered = first + keys - columns if columns < room else 0
        return replace(self, mask=mask, bias=bias, slopes=slopes, number=number, first=first, covered=covered)

    def kept(self, heads: int, rows: slice, keys: slice) -> torch.Tensor | None:
        """bool (heads, rows, keys): whom dropout leaves, None for all."""
        if self.keep == dropout.STEPS:
            return None
        numbers = torch.arange(self.number * heads, (self.number + 1) * heads, device="cpu")
        return dropout.kept(self.seed, numbers, rows, self._from_first(keys), self.keep)

    def changed(self, scores: torch.Tensor, window: Window, rows: slice, keys: slice):
        """What softmax is of, in place of q k^T, scaled; and with a cap its tanh, for the derivative."""
        tanh = None
        if self.softcap > 0:
            tanh = scores.div_(self.softcap).tanh_()
            scores = tanh * self.softcap
        if self.bias is not None:
            bias = self.cut_bias(rows, keys).float()
            huge = (bias.abs() > _HUGE / max(1.0, self.bias_scale)).any()
            finite = scores.isfinite() & bias.isfinite() if huge else None
            scores = scores.add_(bias, alpha=self.bias_scale)
            if finite is not None:  # sums of what is finite stay so
                scores = scores.clamp(-_LARGEST, _LARGEST).where(finite, scores)
        if self.slopes is not None:
            row, key = (torch.arange(part.start, part.stop, device="cpu") for part in (rows, keys))
            distance = (row.unsqueeze(1) + window.shift - key).abs()
            scores = torch.addcmul(scores, self.slopes[:, None, None], distance.float(), value=-1)
        return scores, tanh

    def seen(self, rows: slice, keys: slice) -> torch.Tensor | None:
        """bool (heads or 1, rows or 1, keys or 1): which pairs a mask and a bias leave, None for all."""
        seen = None if self.mask is None else self._seen_by_mask(rows, keys)
        if self.bias is not None:
            there_are = ~self.cut_bias(rows, keys).isneginf()
            seen = there_are if seen is None else seen & there_are
        return seen

    def _seen_by_mask(self, rows: slice, keys: slice) -> torch.Tensor:
        start, stop = (max(0, key + self.first - self.covered) for key in (keys.start, keys.stop))
        mask = self.mask if self.mask.shape[1] == 1 else self.mask[:, rows]
        if mask.dtype == torch.uint8:
            bit = torch.arange(8, dtype=torch.uint8, device="cpu")
            bits = mask[..., start // 8 : -(-stop // 8)].unsqueeze(-1) >> bit & 1
            mask = bits.bool().flatten(-2)[..., start % 8 : start % 8 + stop - start]
        else:
            mask = mask[..., start:stop]
        before = keys.stop - keys.start - (stop - start)  # keys that it does not cover
        return torch.nn.functional.pad(mask, (before, 0), value=True) if before else mask

    def cut_bias(self, rows: slice, keys: slice) -> torch.Tensor:
        """The part of a sequence's bias for some queries and keys."""
        bias = self.bias if self.bias.shape[1] == 1 else self.bias[:, rows]
        return bias if bias.shape[2] == 1 else bias[..., self._from_first(keys)]

    def _from_first(self, keys: slice) -> slice:
        return slice(keys.start + self.first, keys.stop + self.first)


@dataclass(frozen=True)
class _Block:
    """Of some queries and the keys that they may see: tensors are (heads, rows, keys)."""

    rows: slice
    keys: slice
    q: torch.Tensor  # (heads_kv, group * rows, head_dim), 0 in queries that see nothing
    hidden: torch.Tensor  # (heads or 1, rows, keys)
    blind: torch.Tensor  # (heads or 1, rows): who sees no key
    unseen: torch.Tensor  # (heads_kv or 1, keys): whom nobody sees
    scores: torch.Tensor
    tanh: torch.Tensor | None
    kept: torch.Tensor | None


def forward(q, k, v, softmax_scale, window_left, window_right, ranges, scores: Scores):
    """float32 out and lse of one sequence, (1, heads, rows, ...), and who sees no key, (1, heads, rows)."""
    q, k, v = q[0], k[0].float(), v[0].float()
    window = Window.of(q.shape[1], k.shape[1], window_left, window_right)
    out = torch.zeros(*q.shape[:2], v.shape[2], **FLOAT)
    lse = torch.full(q.shape[:2], -torch.inf, **FLOAT)
    for block in _blocks(q, k, softmax_scale, window, ranges, scores):
        # With the infinities and NaNs that PyTorch's operators give.
        weights = block.scores.softmax(-1).masked_fill_(block.blind.unsqueeze(-1), 0)
        lse[:, block.rows] = block.scores.logsumexp(-1)
        if block.kept is not None:
            weights.mul_(block.kept).mul_(dropout.STEPS / scores.keep)
        values = v[:, block.keys].masked_fill(block.unseen.unsqueeze(-1), 0)
        out[:, block.rows] = _ungrouped(_grouped(weights, len(v)) @ values, len(q))
    return out.unsqueeze(0), lse.unsqueeze(0)


def backward(dout, dlse, q, out, lse, k, v, softmax_scale, window_left, window_right, ranges, scores: Scores):
    """float32 dq, dk and dv of one sequence, and who sees no key, bool (1, heads, rows)."""
    tensors = dout, dlse, q, out, lse, k, v = [x[0].float() for x in (dout, dlse, q, out, lse, k, v)]
    window = Window.of(q.shape[1], k.shape[1], window_left, window_right)
    dq, dk, dv = (torch.zeros(x.shape, **FLOAT) for x in (q, k, v))
    sees_nothing = torch.ones(q.shape[:2], dtype=torch.bool, device="cpu")
    for block, of_out, left, of_scores in _gradients(*tensors, softmax_scale, window, ranges, scores):
        rows, keys = block.rows, block.keys
        sees_nothing[:, rows] = block.blind
        dv[:, keys] += _grouped(left, len(v)).mT @ of_out
        if block.tanh is not None:
            of_scores.addcmul_(of_scores * block.tanh, block.tanh, value=-1).masked_fill_(block.hidden, 0)
        of_scores = _grouped(of_scores.mul_(softmax_scale), len(k))
        seen_keys = k[:, keys].masked_fill(block.unseen.unsqueeze(-1), 0)
        dq[:, rows] = _ungrouped(of_scores @ seen_keys, len(q))
        dk[:, keys] += of_scores.mT @ block.q
    return *(x.unsqueeze(0) for x in (dq, dk, dv)), sees_nothing.unsqueeze(0)


def add_bias_gradient(
    dbias, dv, dout, dlse, q, out, lse, k, v, softmax_scale, window_left, window_right, ranges, scores: Scores
) -> None:
    """Adds those of one sequence to dbias and dv, which may be None, float32 and like its bias and v."""
    tensors = [x[0].float() for x in (dout, dlse, q, out, lse, k, v)]
    window = Window.of(q.shape[2], k.shape[2], window_left, window_right)
    of_bias = replace(scores, bias=dbias)
    for block, of_out, left, of_scores in _gradients(*tensors, softmax_scale, window, ranges, scores):
        part = of_bias.cut_bias(block.rows, block.keys)
        part.add_(of_scores.sum_to_size(part.shape), alpha=scores.bias_scale)
        if dv is not None:
            dv[0][:, block.keys] += _grouped(left, len(v[0])).mT @ of_out


def write_weights(weights, q, lse, k, softmax_scale, window_left, window_right, ranges, scores: Scores):
    """Of one sequence, where these are not 0."""
    window = Window.of(q.shape[2], k.shape[2], window_left, window_right)
    lse = lse[0].where(lse[0].isfinite(), torch.nan)
    for block in _blocks(q[0], k[0].float(), softmax_scale, window, ranges, scores):
        of_block = _weights(block.scores, lse[:, block.rows]).masked_fill_(block.hidden, 0)
        weights[0][:, block.rows, block.keys] = of_block


def _gradients(dout, dlse, q, out, lse, k, v, softmax_scale: float, window: Window, ranges, scores: Scores):
    """Of each block: dout, as its q, the weights that dropout leaves, and the gradient of its scores."""
    lse = lse.where(lse.isfinite(), torch.nan)  # softmax of an infinite score is NaN
    for block in _blocks(q, k, softmax_scale, window, ranges, scores):
        rows, keys = block.rows, block.keys
        of_out = dout[:, rows].masked_fill(block.blind.unsqueeze(-1), 0)
        delta = (of_out * out[:, rows]).sum(-1) - dlse[:, rows]
        left = weights = _weights(block.scores, lse[:, rows]).masked_fill_(block.hidden, 0)
        of_out = _grouped(of_out, len(v))
        of_weights = _ungrouped(of_out @ v[:, keys].masked_fill(block.unseen.unsqueeze(-1), 0).mT, len(q))
        if block.kept is not None:
            factors = block.kept * (dropout.STEPS / scores.keep)
            left, of_weights = weights * factors, of_weights.mul_(factors)
        of_scores = of_weights.sub_(delta.unsqueeze(-1)).mul_(weights).masked_fill_(block.hidden, 0)
        yield block, of_out, left, of_scores


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores - lse), where lse may be so large that it has no room for the logarithm of a few keys."""
    weights = (scores - lse.unsqueeze(-1)).exp_()
    coarse = lse.abs() > _COARSE
    if coarse.any():
        share = (scores.logsumexp(-1) - lse).exp()
        weights = weights.where(~coarse.unsqueeze(-1), scores.softmax(-1) * share.unsqueeze(-1))
    return weights


def _blocks(q, k, scale: float, window: Window, ranges, scores: Scores) -> Iterator[_Block]:
    if not (q.numel() and k.numel()):
        return
    heads, kv_heads = len(q), len(k)
    words = max(1, _SCORES // (heads * window.seqlen_k * dropout.QUERIES))
    for rows, keys, seen in key_ranges.seen_in_blocks(window, ranges, words * dropout.QUERIES):
        if keys.start >= keys.stop:
            continue
        seen = seen.unsqueeze(0) if seen.dim() == 2 else seen[0]  # of a sequence
        own = scores.seen(rows, keys)
        hidden = ~(seen if own is None else seen & own)
        blind, unseen = hidden.all(-1), hidden.all(-2)
        unseen = unseen if len(unseen) == 1 else unseen.view(kv_heads, -1, unseen.shape[-1]).all(1)
        queries = _grouped(q[:, rows].float().masked_fill(blind.unsqueeze(-1), 0), kv_heads)
        products = _ungrouped(queries @ k[:, keys].mT, heads).mul_(scale)
        changed, tanh = scores.changed(products, window, rows, keys)
        kept = scores.kept(heads, rows, keys)
        changed = changed.masked_fill_(hidden, -torch.inf)
        yield _Block(rows, keys, queries, hidden, blind, unseen, changed, tanh, kept)


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(heads, rows, ...) as (heads_kv, group * rows, ...): the queries of all heads that share keys."""
    return x.reshape(kv_heads, -1, x.shape[-1])


def _ungrouped(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.view(heads, -1, x.shape[-1])
