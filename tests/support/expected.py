"""Attention of one sequence over the keys that its queries see, as written in a textbook, and its gradients.

It shares nothing with flash_cute: (heads, rows, head_dim) and booleans in, with sinks as one more column.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from support.precision import RoundedProducts

# What rounding to a type, or to TF32, adds to a number at most, relative to it.
EPSILONS = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-24, "tf32": 2**-11}

# What is less than this is finite, and yet the lowest number of some type beside which scores are nothing.
LOWEST = -1e30
# An LSE that is less has a few bits behind the point.
LOW = -1e4


def resolution(lse: torch.Tensor) -> torch.Tensor:
    """By how much rounding to float32 changes a number of the size of a low LSE; 0 where it is not low.

    Low is that of rows that see nothing but float16's lowest number, -65504, and this is 2^-8 there. Kernels
    round such numbers several times: scores, in their unit, the LSE, and the LSE in base 2, each by so much
    or by half of it. (PyTorch's softmax subtracts the maximum, and has none of this.) So the LSE errs by
    about 2^-8, and P = exp(score - LSE), which the backward computes again, by about 2^-8 of itself. An
    emulation of this arithmetic with the tests' scales and caps has errors of 1.1 * 2^-8 in the LSE and 0.8
    * 2^-8 in P at most by RMS, 2.0 * 2^-8 and 2.5 * 2^-8 by maximum. The lowest numbers of other types are
    exact in both.
    """
    return torch.where((lse < LOW) & (lse > LOWEST), lse.abs() * EPSILONS[torch.float32], 0)


@dataclass(frozen=True)
class Sequence:
    """q (heads_q, rows, head_dim), k likewise (heads_kv, keys, ...), v of any width.

    sees is (heads_q or 1, rows, keys), or without heads, sinks are (heads_q,). What is added to the scores,
    float64, and whom dropout keeps, booleans, are (heads_q, rows, keys).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sees: torch.Tensor
    sinks: torch.Tensor | None
    scale: float
    tf32: bool = False
    softcap: float = 0.0
    added: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    keep: float = 1.0

    @property
    def fully_masked(self) -> torch.Tensor:
        """(heads_q, rows): who has neither a key nor a sink."""
        no_key = ~self.sees.any(-1).expand(self.q.shape[0], -1)
        return no_key if self.sinks is None else no_key & self.sinks.isneginf().unsqueeze(-1)

    @property
    def epsilon(self) -> float:
        return EPSILONS["tf32" if self.tf32 else self.q.dtype]

    def leaves(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """q, k, v and sinks in dtype; what no query sees may hold NaN, and is 0."""
        seen = self.sees.any(-2)
        if seen.dim() == 2 and len(seen) > 1:
            seen = seen.unflatten(0, (len(self.k), -1)).any(1)
        hidden = ~seen.unsqueeze(-1)
        tensors = [self.q, self.k.masked_fill(hidden, 0), self.v.masked_fill(hidden, 0)]
        tensors += [] if self.sinks is None else [self.sinks]
        return [x.detach().to(dtype).requires_grad_() for x in tensors]

    def attention(self, q, k, v, sinks=None) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of the leaves, in their type; lse in float32 or wider."""
        group = q.shape[0] // k.shape[0]
        k, v = (x.repeat_interleave(group, 0) for x in (k, v))
        scores = self.changed(self.product(q, k.mT) * self.scale).masked_fill(~self.sees, -torch.inf)
        if sinks is not None:
            column = torch.where(sinks.isneginf(), -torch.inf, sinks)  # no sink has no gradient
            scores = torch.cat((scores, column[:, None, None].expand(-1, scores.shape[1], 1)), -1)
        weights = scores.softmax(-1).masked_fill(self.fully_masked.unsqueeze(-1), 0)
        out = self.product(self.dropped(weights[..., : k.shape[1]]), v)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self.added is None or not scores.shape[-1]:
            return out, scores.logsumexp(-1)
        # Beside the lowest numbers there is no room for the logarithm of a few keys, which the gradient has.
        highest = scores.detach().amax(-1, keepdim=True)
        lowest = torch.where((highest < LOWEST) & highest.isfinite(), highest, 0)
        return out, (scores - lowest).logsumexp(-1) + lowest.squeeze(-1)

    def changed(self, scores: torch.Tensor) -> torch.Tensor:
        """Capped, and with what is added; of 16 bits rounded once, and no finite sum to infinity."""
        if not self.softcap and self.added is None:
            return scores
        dtype = scores.dtype
        scores = scores.to(torch.promote_types(dtype, torch.float32))
        if self.softcap:
            scores = self.softcap * (scores / self.softcap).tanh()
        if self.added is not None:
            scores = scores + self.added.to(scores.dtype)
            bounds = torch.finfo(dtype)
            scores = torch.where(self.added.isfinite(), scores.clamp(bounds.min, bounds.max), scores)
        return scores.to(dtype)

    def dropped(self, weights: torch.Tensor) -> torch.Tensor:
        return weights if self.kept is None else weights * self.kept / self.keep

    def product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a @ b in their type; of 16 bits by float32, as a CPU is slow at its own such products."""
        if a.device.type == "cpu" and a.element_size() == 2:
            return (a.float() @ b.float()).to(a.dtype)
        if self.tf32 and a.dtype == torch.float32:
            with RoundedProducts():
                return a @ b
        return a @ b

    def forward(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return self.attention(*self.leaves(dtype))

    def rounded_forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """In q's type; sinks come to rounded results without them, as where parts of the keys are merged."""
        results = replace(self, sinks=None).forward(self.q.dtype)
        if self.sinks is None:
            return results
        (out, lse), sinks = results, self.sinks.float().unsqueeze(-1)
        whole = torch.logaddexp(lse, sinks)
        share = (lse - whole).exp().masked_fill(lse.isneginf(), 0).to(out.dtype)
        return out * share.unsqueeze(-1), whole

    def gradients(self, dout: torch.Tensor, dlse: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """By autograd, of q, k, v, sinks and what is added, if there are these.

        What comes back to fully masked rows does not count.
        """
        added = [] if self.added is None else [self.added.detach().requires_grad_()]
        with torch.enable_grad():
            leaves = self.leaves(dtype)
            out, lse = replace(self, added=added[0] if added else None).attention(*leaves)
        no_key = ~self.sees.any(-1)
        dout = dout.to(dtype).masked_fill(no_key.unsqueeze(-1), 0)
        return torch.autograd.grad(
            (out, lse),
            leaves + added,
            (dout, dlse.to(lse.dtype).masked_fill(self.fully_masked, 0)),
            materialize_grads=True,
        )

    def gradients_of_rounded_out(self, dout: torch.Tensor, dlse: torch.Tensor) -> list[torch.Tensor]:
        """As FlashAttention has them: in float32 with weights, their gradients and out rounded to q's type.

        Of few numbers PyTorch's own may happen to be exact, where any such backward is not.
        """
        dtype, group = self.q.dtype, self.q.shape[0] // self.k.shape[0]
        q, k, v, *sinks = (x.detach() for x in self.leaves(torch.float32))
        lse = self.attention(q, k, v, *sinks)[1]
        k, v = (x.repeat_interleave(group, 0) for x in (k, v))
        dout = dout.float().masked_fill(~self.sees.any(-1, keepdim=True), 0)
        dlse, lse = dlse.masked_fill(self.fully_masked, 0), lse.masked_fill(self.fully_masked, torch.inf)
        # The forward's scores again, but not to the bit: another kernel sums them.
        products = self.product(q.flip(-1), k.flip(-1).mT) * self.scale
        scores = self.changed(products).masked_fill(~self.sees, -torch.inf)
        # What float32 has no room for beside the lowest numbers is not rounding.
        low = (lse < LOWEST).unsqueeze(-1)
        weights = torch.where(low, scores.softmax(-1), (scores - lse.unsqueeze(-1)).exp())
        weights = weights.masked_fill(~self.sees, 0)
        delta = dlse - (dout * self.rounded_forward()[0]).sum(-1)
        of_weights = self.dropped(self.product(dout, v.mT)) + delta.unsqueeze(-1)
        of_changed = weights * of_weights
        of_scores = self.rounded(of_changed * self.slope(products))
        found = self.multiplied(of_scores, self.rounded(self.dropped(weights)), q, k, dout)
        found = [x.to(dtype) for x in found]
        found += [((s.unsqueeze(-1) - lse).exp() * delta).sum(-1) for s in sinks]
        return found if self.added is None else [*found, of_changed.sum_to_size(self.added.shape)]

    def resolution_of_gradients(self, dout: torch.Tensor, dlse: torch.Tensor) -> list[torch.Tensor]:
        """By how much each gradient errs, to first order, if P does by resolution(lse) of itself.

        In dV; in dS = P (dP - delta + dLSE), and there by delta, too, whose out the forward made of its P.
        """
        q, k, v, *sinks = (x.detach() for x in self.leaves(torch.float64))
        out, lse = self.attention(q, k, v, *sinks)
        k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
        dout, error = dout.double(), resolution(lse).unsqueeze(-1)
        products = self.product(q, k.mT) * self.scale
        scores = self.changed(products).masked_fill(~self.sees, -torch.inf)
        weights = torch.where(error > 0, (scores - lse.unsqueeze(-1)).exp(), 0)
        of_weights = self.dropped(self.product(dout, v.mT))
        delta = dlse - (dout * out).sum(-1)
        terms = (of_weights + delta.unsqueeze(-1)).abs() + (weights * of_weights.abs()).sum(-1, keepdim=True)
        of_changed = error * weights * terms
        of_scores = of_changed * self.slope(products)
        found = self.multiplied(of_scores, self.dropped(error * weights), q.abs(), k.abs(), dout.abs())
        found += [torch.zeros_like(x) for x in sinks]  # a sink's logit is not low
        return [*found, of_changed.sum_to_size(self.added.shape)]

    def slope(self, products: torch.Tensor) -> torch.Tensor | int:
        """The derivative of a capped score."""
        return 1 - (products / self.softcap).tanh().square() if self.softcap else 1

    def multiplied(self, of_scores, weights, q, k, dout) -> list[torch.Tensor]:
        """dq, dk and dv, of a k for each of q's heads."""
        of_scores = of_scores * self.scale
        found = [self.product(*pair) for pair in ((of_scores, k), (of_scores.mT, q), (weights.mT, dout))]
        found[1:] = (x.unflatten(0, (-1, q.shape[0] // self.k.shape[0])).sum(1) for x in found[1:])
        return found

    def chances(self, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(heads_q,), (heads_q, rows, 1): the variances of what rounding out adds to sums.

        Of all rows, to a sink's gradient, and of each row's keys, to that of a number that is added to all.
        """
        out, lse = self.forward(torch.float64)
        sees = self.sees.any(-1)
        steps = dout.double().where(sees.unsqueeze(-1), 0) * out * self.epsilon
        of_rows = steps.square().sum(-1) / 3
        if self.sinks is None:
            return out.new_zeros(len(out)), of_rows.unsqueeze(-1)
        shares = (self.sinks.double().unsqueeze(-1) - lse).exp().masked_fill(~sees, 0)
        return (shares.square() * of_rows).sum(-1), ((1 - shares).square() * of_rows).unsqueeze(-1)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.q.dtype).float()
