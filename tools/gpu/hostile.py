"""Tries to break the backward of attention and softmax. Run in the checkout: python build/gpu/hostile.py [part ...]

HOSTILE_SEED, HOSTILE_SCALE (of the numbers of cases; 1), HOSTILE_ONLY_SM90=1. A line for each failed case, then
`hostile: N checks, M failures`.
"""

import ctypes
import json
import os
import random
import subprocess
import sys
import time
import traceback

sys.path.insert(0, os.getcwd())
import torch

import flash_cute
from flash_cute import reference
from flash_cute.row_softmax import hidden_columns

GPU = torch.cuda.is_available()
DEV = torch.device("cuda" if GPU else "cpu")
SEED = int(os.environ.get("HOSTILE_SEED", "1"))
SCALE = float(os.environ.get("HOSTILE_SCALE", "1" if GPU else "0.1"))
OPS = torch.ops.flash_cute
BEGIN = time.time()
checks = failures = 0
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}


def say(text):
    print(text, flush=True)


def fail(where, why):
    global failures
    failures += 1
    if failures <= 60:
        say(f"FAIL {where}: {why}")


def verdict(where, why):
    """why: None or what is wrong."""
    global checks
    checks += 1
    if why:
        fail(where, why)


def sync():
    if GPU:
        torch.cuda.synchronize()


def families():
    if not GPU:
        return [None]
    found = list(flash_cute.supported()["families"])
    if torch.cuda.get_device_capability() != (9, 0):
        found = [f for f in found if f != "sm90"]
    return [f for f in found if not (os.environ.get("HOSTILE_ONLY_SM90") and f != "sm90")]


def apart(ours, yard, oracle, dtype, strict=1.0, terms=1, keys=1e9):
    """None, or how ours is further from the oracle than the rule allows (with some room, as cases are small).

    terms: of a sum whose exact value may be 0, which PyTorch's then is, too; keys that a query sees, as with
    few of them what was rounded in out shows.
    """
    slack = 1e-5 + (4e-6 + EPS[dtype] / max(1, keys)) * terms**0.5
    if ours.shape != oracle.shape:
        return f"shape {tuple(ours.shape)} for {tuple(oracle.shape)}"
    if ours.numel() == 0:
        return None
    ours, yard, oracle = ours.double(), yard.double(), oracle.double()
    finite = oracle.isfinite()
    wrong = (ours.isnan() != oracle.isnan()).sum() + (ours.isneginf() != oracle.isneginf()).sum()
    wrong = wrong + (ours.isposinf() != oracle.isposinf()).sum()
    err, allowed = ((x - oracle).where(finite, 0).abs() for x in (ours, yard))
    size = oracle.where(finite, 0).abs()
    rms = lambda x: x.square().mean().sqrt()  # noqa: E731
    eps = EPS[dtype]
    bounds = torch.stack(
        [
            wrong.double(),
            err.max(),
            strict * (3 * allowed.max() + slack + 2 * eps * size.max()),
            rms(err),
            strict * (2.5 * rms(allowed) + slack + 0.5 * eps * rms(size)),
        ]
    ).tolist()
    if bounds[0]:
        return f"{int(bounds[0])} of {ours.numel()} elements are NaN or infinite where the oracle is not, or not so"
    if not bounds[1] <= bounds[2]:
        return f"max error {bounds[1]:.3e} > {bounds[2]:.3e}"
    if not bounds[3] <= bounds[4]:
        return f"rms error {bounds[3]:.3e} > {bounds[4]:.3e}"
    return None


def poison(n_bytes=1 << 26):
    """Leaves -1.0 (as int: negative) in what the allocator gives next."""
    for n in (n_bytes, n_bytes // 8, n_bytes // 64):
        junk = torch.full((n // 4,), -1.0, device=DEV)
        del junk


HEAD_DIMS = (1, 8, 16, 33, 40, 64, 64, 72, 96, 100, 104, 128, 128, 136, 160, 192, 200, 250, 256, 256)
LENGTHS = (1, 2, 3, 17, 63, 64, 65, 127, 128, 129, 191, 193, 255, 257, 300)


def draw_mask(rng):
    causal = rng.random() < 0.35
    limit = lambda: rng.choice((None, None, 0, 1, 7, rng.randint(0, 70), rng.randint(0, 300)))  # noqa: E731
    window = (limit(), limit()) if rng.random() < 0.5 else (None, None)
    return causal, window


def draw_length(rng, most=400):
    return min(most, rng.choice(LENGTHS) if rng.random() < 0.5 else rng.randint(1, most))


def make(rng, b, h, s, d, dtype, gen, expand=True):
    """(b, h, s, d) in a random layout whose other elements are NaN."""
    kind = rng.choice(("bhsd", "bshd", "sbhd", "hbsd", "bhsd+", "bshd+", "bsdh", "odd", "rows") + ("xb", "xh") * expand)
    base = torch.randn(b, h, s, d, generator=gen, device=DEV).to(dtype)
    if kind in ("bhsd", "bshd", "sbhd", "hbsd", "bsdh"):
        order = ["bhsd".index(c) for c in kind]
        back = [kind.index(c) for c in "bhsd"]
        return base.permute(order).contiguous().permute(back)
    if kind == "xb":
        return base[:1].expand(b, h, s, d)
    if kind == "xh":
        return base[:, :1].expand(b, h, s, d)
    more_d, more_s = {"bhsd+": (8, 3), "bshd+": (16, 70), "odd": (3, 1), "rows": (0, 130)}[kind]
    if kind == "bshd+":
        room = torch.full((b, s + more_s, h, d + more_d), torch.nan, device=DEV, dtype=dtype).transpose(1, 2)
    else:
        room = torch.full((b, h, s + more_s, d + more_d), torch.nan, device=DEV, dtype=dtype)
    view = room[:, :, :s, :d]
    return view.copy_(base)


SUBSETS = ((True, True), (True, True), (True, False), (False, True))
GIVEN = ((True, True), (True, True), (True, False), (False, True))


def part_dense(limit=6.0):
    for family in families():
        begin, rng = time.time(), random.Random(f"{SEED} dense {family}")
        gen = torch.Generator(DEV).manual_seed(SEED)
        for i in range(int(260 * SCALE) + 1):
            if time.time() - begin > limit:
                say(f"dense {family}: stopped after {i} cases")
                break
            most = 400 if GPU else 60
            b, hk, group = rng.randint(1, 3), rng.randint(1, 3), rng.choice((1, 1, 2, 3, 5))
            sq, sk, d = draw_length(rng, most), draw_length(rng, most), rng.choice(HEAD_DIMS)
            if rng.random() < 0.1 and GPU:
                b, hk = rng.choice(((40, 8), (9, 16), (70, 3)))  # more tiles than multiprocessors
                group, sq, sk = rng.choice((1, 2)), draw_length(rng, 150), draw_length(rng, 150)
            dtype = rng.choice((torch.bfloat16, torch.float16))
            causal, (left, right) = draw_mask(rng)
            det, (dq, dkv), (has_dout, has_dlse) = rng.random() < 0.5, rng.choice(SUBSETS), rng.choice(GIVEN)
            where = (
                f"dense {family} #{i} b{b} hq{hk * group} hk{hk} sq{sq} sk{sk} d{d} {dtype} causal={causal} "
                f"window={left, right} det={det} needs={dq, dkv} dout,dlse={has_dout, has_dlse}"
            )
            try:
                q = make(rng, b, hk * group, sq, d, dtype, gen)
                k, v = (make(rng, b, hk, sk, d, dtype, gen) for _ in range(2))
                dout = make(rng, b, hk * group, sq, d, dtype, gen) if has_dout else None
                dlse = torch.randn(b, hk * group, sq, generator=gen, device=DEV) if has_dlse else None
                options = {"window_left": left, "window_right": right, "family": family}
                if i % 4 == 0:
                    poison(1 << 24)
                out, lse = OPS._forward(q, k, v, causal, **options)
                got = OPS._backward(
                    dout, dlse, q, k, v, out, lse, causal, **options, deterministic=det, needs_dq=dq, needs_dkv=dkv
                )
                kinds = {"causal": causal, "window": (left, right)}
                with torch.no_grad():
                    oracle = reference.forward(q, k, v, **kinds)
                    yard = reference.forward(q, k, v, **kinds, dtype=dtype)
                verdict(where + " out", apart(out, yard[0], oracle[0], dtype))
                verdict(where + " lse", apart(lse, yard[1], oracle[1], dtype))
                oracle = reference.backward(q, k, v, dout, dlse, **kinds)
                yard = reference.backward(q, k, v, dout, dlse, **kinds, dtype=dtype)
                seen = reference.visible(sq, sk, causal, (left, right)).sum(1).double().mean().item()
                for name, wanted, *three in zip(("dq", "dk", "dv"), (dq, dkv, dkv), got, yard, oracle):
                    if wanted:
                        verdict(f"{where} {name}", apart(*three, dtype, terms=max(sq * group, sk), keys=seen))
            except Exception as error:  # noqa: BLE001
                verdict(where, f"{type(error).__name__}: {str(error)[:300]}")
                if "CUDA error" in str(error):
                    raise


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEV)


def draw_ragged(rng, packed, most):
    """[(rows_q, rows_k, used_q, leftpad, used_k)]"""
    sequences = []
    for _ in range(rng.randint(1, 6)):
        n = rng.choice((0, 1, 5)) if rng.random() < 0.2 else draw_length(rng, most)
        m = rng.choice((0, 1, 5)) if rng.random() < 0.2 else draw_length(rng, most)
        used_q, used_k = (x if rng.random() < 0.6 else rng.randint(0, x) for x in (n, m))
        sequences.append((n, m, used_q, 0 if rng.random() < 0.6 else rng.randint(0, used_k), used_k))
    return sequences


def ragged(rng, sequences, packed, hq, hk, d, dtype, gen):
    """Tensors with NaN in rows that don't count, the lengths, and where each sequence is."""
    begins = []
    for side in (0, 1):
        at = rng.choice((0, 0, 3, 150))
        begins.append([])
        for s in sequences:
            begins[-1].append(at)
            at += s[side]
        begins[-1].append(at)
    behind = rng.choice((0, 0, 5, 200))
    if packed:
        rows = [x[-1] + behind for x in begins]
        entries = 1
        places = [
            (0, slice(q, q + s[2]), slice(k + s[3], k + s[4]))
            for s, q, k in zip(sequences, begins[0], begins[1])
        ]
        lengths = {"cu_seqlens_q": int32(begins[0]), "cu_seqlens_k": int32(begins[1])}
    else:
        rows = [max(s[side] for s in sequences) + 1 for side in (0, 1)]
        entries = len(sequences)
        places = [(b, slice(0, s[2]), slice(s[3], s[4])) for b, s in enumerate(sequences)]
        lengths = {}
    lengths |= {
        "seqused_q": int32([s[2] for s in sequences]),
        "seqused_k": int32([s[4] for s in sequences]),
        "leftpad_k": int32([s[3] for s in sequences]),
    }
    tensors = [
        make(rng, entries, h, n, d, dtype, gen, expand=False)
        for h, n in ((hq, rows[0]), (hk, rows[1]), (hk, rows[1]), (hq, rows[0]))
    ]
    dlse = torch.randn(entries, hq, rows[0], generator=gen, device=DEV)
    for tensor, axis in zip((*tensors, dlse.unsqueeze(-1)), (1, 2, 2, 1, 1)):
        counts = torch.zeros(entries, tensor.shape[2], dtype=torch.bool, device=DEV)
        for place in places:
            counts[place[0], place[axis]] = True
        tensor.transpose(1, 2)[~counts] = torch.nan
    return tensors, dlse, lengths, places


def part_ragged(limit=5.0):
    for family in families():
        begin, rng = time.time(), random.Random(f"{SEED} ragged {family}")
        gen = torch.Generator(DEV).manual_seed(SEED + 1)
        for i in range(int(110 * SCALE) + 1):
            if time.time() - begin > limit:
                say(f"ragged {family}: stopped after {i} cases")
                break
            packed, d, dtype = rng.random() < 0.5, rng.choice(HEAD_DIMS), rng.choice((torch.bfloat16, torch.float16))
            hk, group = rng.randint(1, 2), rng.choice((1, 1, 2, 4))
            hq, (causal, (left, right)), det = hk * group, draw_mask(rng), rng.random() < 0.5
            dq, dkv = rng.choice(SUBSETS)
            sequences = draw_ragged(rng, packed, 300 if GPU else 40)
            where = (
                f"ragged {family} #{i} packed={packed} hq{hq} hk{hk} d{d} {dtype} causal={causal} "
                f"window={left, right} det={det} needs={dq, dkv} {sequences}"
            )
            try:
                (q, k, v, dout), dlse, lengths, places = ragged(rng, sequences, packed, hq, hk, d, dtype, gen)
                flat = (lambda x: x[0].transpose(0, 1)) if packed else (lambda x: x)
                given = [flat(x) for x in (q, k, v)]
                options = {"window_left": left, "window_right": right, "family": family, **lengths}
                forward, backward = (OPS._forward_varlen, OPS._backward_varlen) if packed else (OPS._forward, OPS._backward)
                if i % 3 == 0:
                    poison(1 << 24)
                out, lse = forward(*given, causal=causal, **options)
                got = backward(
                    *(flat(dout), dlse[0] if packed else dlse, *given, out, lse),
                    **{"causal": causal, "deterministic": det, "needs_dq": dq, "needs_dkv": dkv, **options},
                )
                wanted = [w for w in (dq, dkv, dkv)]
                got = [(x.transpose(0, 1).unsqueeze(0) if packed else x) if w else None for x, w in zip(got, wanted)]
                oracle, yard = ([torch.zeros(x.shape, dtype=t, device=DEV) for x in (q, k, v)] for t in (torch.float64, dtype))
                for entry, rows, keys in places:
                    one = [
                        x[entry, :, p].unsqueeze(0)
                        for x, p in ((q, rows), (k, keys), (v, keys), (dout, rows), (dlse, rows))
                    ]
                    for results, t in ((oracle, torch.float64), (yard, dtype)):
                        parts = reference.backward(*one, causal=causal, window=(left, right), dtype=t)
                        for whole, p, found in zip(results, (rows, keys, keys), parts):
                            whole[entry, :, p] = found[0]
                for name, w, ours, *two in zip(("dq", "dk", "dv"), wanted, got, yard, oracle):
                    if w:
                        verdict(f"{where} {name}", apart(ours, *two, dtype, terms=300 * group))
            except Exception as error:  # noqa: BLE001
                verdict(where, f"{type(error).__name__}: {str(error)[:300]}")
                if "CUDA error" in str(error):
                    raise


class Call:
    """A backward whose inputs stay, with its results when nothing else ran."""

    def __init__(self, name, d, b=2, hq=4, hk=4, sq=300, sk=300, dtype=torch.bfloat16, lens=None, seed=0, **options):
        gen = torch.Generator(DEV).manual_seed(SEED * 1000 + seed)
        rand = lambda *size: torch.randn(*size, generator=gen, device=DEV).to(dtype)  # noqa: E731
        self.name, self.packed = f"{name} d{d}", lens is not None
        self.options = options
        self.det = options.pop("deterministic", True)
        if lens is None:
            self.q, self.dout = (rand(b, sq, hq, d).transpose(1, 2) for _ in range(2))
            self.k, self.v = (rand(b, hk, sk, d) for _ in range(2))
            self.dlse = torch.randn(b, hq, sq, generator=gen, device=DEV)
        else:
            self.cu = [int32([sum(x[side] for x in lens[:n]) for n in range(len(lens) + 1)]) for side in (0, 1)]
            total = [sum(x[side] for x in lens) for side in (0, 1)]
            self.q, self.dout = (rand(total[0], hq, d) for _ in range(2))
            self.k, self.v = (rand(total[1], hk, d) for _ in range(2))
            self.dlse = torch.randn(hq, total[0], generator=gen, device=DEV)
            self.options = {**options, "cu_seqlens_q": self.cu[0], "cu_seqlens_k": self.cu[1]}
        self.out, self.lse = self.forward()
        self.expected = self.backward()
        sync()

    def forward(self):
        return (OPS._forward_varlen if self.packed else OPS._forward)(self.q, self.k, self.v, **self.options)

    def backward(self, out=None, lse=None, det=None, **more):
        op = OPS._backward_varlen if self.packed else OPS._backward
        out, lse = (self.out, self.lse) if out is None else (out, lse)
        det = self.det if det is None else det
        return op(self.dout, self.dlse, self.q, self.k, self.v, out, lse, deterministic=det, **self.options, **more)

    def differs(self, got, expected=None):
        """As a tensor: how many of the results are not as expected; of the free mode dQ need only be close."""
        bad = torch.zeros((), dtype=torch.int64, device=DEV)
        for name, a, b in zip("qkv", got, self.expected if expected is None else expected):
            if a.numel() == 0:
                continue
            if self.det or name != "q":
                bad += (a != b).any()
            else:
                far = (a.float() - b.float()).abs().max() > 0.03 * b.float().abs().max() + 1e-3
                bad += far | (a.isnan() != b.isnan()).any()
        return bad


def sequences(rng, n, most, most_k=None):
    return [(rng.randint(0, most), rng.randint(0, most_k or most)) for _ in range(n)]


def part_deterministic(limit=11.0):
    begin, rng = time.time(), random.Random(f"{SEED} det")
    reps = 100 if GPU else 2
    full = dict(b=2, hq=8, hk=2, sq=700, sk=900) if GPU else dict(b=1, hq=2, hk=1, sq=40, sk=50)
    many = dict(b=5, hq=16, hk=8, sq=513, sk=513) if GPU else dict(b=2, hq=2, hk=2, sq=33, sk=33)
    blind = dict(b=2, hq=6, hk=3, sq=900, sk=500) if GPU else dict(b=1, hq=2, hk=1, sq=50, sk=30)
    lens = sequences(rng, 12, 600 if GPU else 30)
    short = sequences(rng, 90, 140 if GPU else 9)
    for family in families():
        for d in (64, 96, 128, 192, 256, 40, 100):
            for n, (name, options) in enumerate(
                (
                    ("gqa causal", dict(full, causal=True)),
                    ("gqa full", full),
                    ("many causal", dict(many, causal=True)),
                    ("window", dict(many, window_left=200, window_right=30)),
                    ("blind causal", dict(blind, causal=True)),
                    ("packed causal", dict(hq=4, hk=2, lens=lens, causal=True)),
                    ("packed short", dict(hq=6, hk=6, lens=short, dtype=torch.float16)),
                )
            ):
                if time.time() - begin > limit * (1 + (family == families()[-1])) / 2 and GPU:
                    say(f"deterministic {family} d{d}: out of time")
                    break
                where = f"deterministic {family} {name} d{d}"
                try:
                    call = Call(where, d, seed=n, family=family, **options)
                    bad = torch.zeros((), dtype=torch.int64, device=DEV)
                    for r in range(reps if d in (64, 128, 256) or n % 2 == 0 else reps // 5 + 1):
                        if r % 25 == 0:
                            poison(1 << 22)
                        bad += call.differs(call.backward())
                    verdict(where + " repeats", f"{bad.item()} results have other bits" if bad.item() else None)
                    bad.zero_()
                    for needs in (dict(needs_dq=False), dict(needs_dkv=False)):
                        for _ in range(5):
                            bad += call.differs(call.backward(**needs))
                    verdict(where + " subsets", f"{bad.item()} subsets have other bits" if bad.item() else None)
                    if GPU:  # free mode, which sums dK and dV in one order, too
                        free = call.backward(det=False)
                        for g, e, x in zip(free, call.expected, "qkv"):
                            verdict(f"{where} free d{x}", apart(g, e, e, call.q.dtype, 4.0))
                        again = call.backward(det=False)
                        same = all(torch.equal(a, b) for a, b in zip(free[1:], again[1:]))
                        verdict(where + " free dk dv", None if same else "free dK, dV do not repeat")
                    if not call.packed and GPU:  # an entry alone
                        one = [x[-1:] for x in (call.dout, call.dlse, call.q, call.k, call.v, call.out, call.lse)]
                        alone = OPS._backward(*one, deterministic=True, **call.options)
                        same = all(torch.equal(a, e[-1:]) for a, e in zip(alone, call.expected))
                        verdict(where + " alone", None if same else "an entry alone has other bits than in its batch")
                except Exception as error:  # noqa: BLE001
                    verdict(where, f"{type(error).__name__}: {str(error)[:300]}")
                    if "CUDA error" in str(error):
                        raise


def zoo(big):
    """Calls of all kinds, for what runs beside each other."""
    rng = random.Random(f"{SEED} zoo")
    calls = []
    for family in families():
        for d in (64, 128, 256) if family == "sm80" else (64, 96, 128, 192, 256):
            s = 2048 if big else 520
            calls += [
                Call("causal", d, b=2, hq=8, hk=4, sq=s, sk=s, causal=True, seed=1, family=family),
                Call("free", d, b=2, hq=8, hk=8, sq=s, sk=s + 77, seed=2, deterministic=False, family=family),
                Call("packed", d, hq=4, hk=2, lens=sequences(rng, 25, s // 4), causal=True, seed=3, family=family),
                Call("packed free", d, hq=4, hk=4, lens=sequences(rng, 25, s // 4), seed=4, deterministic=False, family=family),
                Call("window", d, b=3, hq=6, hk=2, sq=s, sk=s // 2, window_left=150, window_right=0, seed=5, family=family),
            ]
    return calls


def part_streams():
    calls = zoo(True)
    long_calls = [
        Call("long", d, b=1, hq=8, hk=8, sq=6000, sk=6000, causal=c, seed=7)
        for d, c in ((64, True), (128, True), (256, True), (128, False))
    ]
    streams = [torch.cuda.Stream(priority=-(n % 2)) for n in range(6)]
    names = [call.name for call in calls + long_calls]
    bad = [torch.zeros(len(names), dtype=torch.int64, device=DEV) for _ in streams]
    sync()
    rng = random.Random(SEED)
    for n in range(150):
        s = n % len(streams)
        i = rng.randrange(len(calls)) if n % 5 else len(calls) + rng.randrange(len(long_calls))
        call = (calls + long_calls)[i]
        with torch.cuda.stream(streams[s]):
            bad[s][i] += call.differs(call.backward())
    sync()
    total = sum(bad).tolist()
    for name, n in zip(names, total):
        verdict(f"streams {name}", f"{n} results differ from those alone" if n else None)
    # Several long kernels in turns at once: parts of each grid are resident.
    bad = [torch.zeros((), dtype=torch.int64, device=DEV) for _ in streams]
    for _ in range(6):
        for s, stream in enumerate(streams):
            call = long_calls[s % len(long_calls)]
            with torch.cuda.stream(stream):
                bad[s] += call.differs(call.backward())
    sync()
    n = sum(bad).item()
    verdict("streams of long calls", f"{n} results differ" if n else None)


def part_busy():
    calls = [
        Call("busy", d, b=2, hq=16, hk=8, sq=1024, sk=1500, causal=True, seed=9, deterministic=det)
        for d in (64, 128, 256)
        for det in (True, False)
    ]
    a, b = (torch.randn(8192, 8192, device=DEV, dtype=torch.bfloat16) for _ in range(2))
    # Some hundred thread blocks that stay for milliseconds, so that few multiprocessors are left.
    q = torch.randn(1, 100, 128, 128, device=DEV, dtype=torch.bfloat16)
    k = torch.randn(1, 1, 600_000, 128, device=DEV, dtype=torch.bfloat16)
    product = lambda: torch.mm(a, b)  # noqa: E731
    few = lambda: OPS._forward(q, k, k)  # noqa: E731
    sleep = lambda: torch.cuda._sleep(3_000_000)  # noqa: E731
    other, mine = torch.cuda.Stream(priority=-1), torch.cuda.Stream()
    sync()
    for name, load in (("products", product), ("few multiprocessors left", few), ("sleepers", sleep)):
        bad = torch.zeros((), dtype=torch.int64, device=DEV)
        for n in range(12):
            with torch.cuda.stream(other):
                load()
            with torch.cuda.stream(mine):
                for call in calls:
                    bad += call.differs(call.backward())
        sync()
        verdict(f"busy: {name}", f"{bad.item()} results differ" if bad.item() else None)


def part_graphs():
    calls = [c for c in zoo(False)]
    x = torch.randn(7, 300_001, device=DEV)
    seen = []

    def body():
        seen.clear()
        for call in calls:
            out, lse = call.forward()
            seen.append((out, lse, *call.backward(out, lse)))
        p, lse = OPS._softmax(x)
        seen.append((p, lse, OPS._softmax_backward(p, lse, p)))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        body()
    sync()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    captured = [tuple(t for t in results) for results in seen]
    for turn in range(4):
        if turn:  # other inputs, other offsets of the same totals
            for n, call in enumerate(calls):
                for t in (call.q, call.k, call.v, call.dout, call.dlse):
                    t.normal_()
                if call.packed:
                    for cu in call.cu:
                        inner = torch.randint(0, int(cu[-1]) + 1, (cu.numel() - 2,), device=DEV, dtype=torch.int32)
                        cu[1:-1] = inner.sort().values
            x.normal_()
        graph.replay()
        sync()
        for call, results in zip(calls, captured):
            out, lse = call.forward()
            expected = (out, lse, *call.backward(out, lse))
            same = all(torch.equal(a, b) for a, b in zip(results[:2], expected[:2]))
            verdict(f"graph {call.name} turn {turn} forward", None if same else "replay differs from the call")
            n = call.differs(results[2:], expected[2:]).item()
            verdict(f"graph {call.name} turn {turn}", f"{n} gradients differ from those of a call" if n else None)
        p, lse = OPS._softmax(x)
        same = torch.equal(p, captured[-1][0]) and torch.equal(OPS._softmax_backward(p, lse, p), captured[-1][2])
        verdict(f"graph softmax turn {turn}", None if same else "replay differs")
        kept = [tuple(t.clone() for t in results) for results in captured]
        bad = torch.zeros((), dtype=torch.int64, device=DEV)
        for _ in range(25):
            graph.replay()
            for call, now, before in zip(calls, captured, kept):
                bad += call.differs(now[2:], before[2:])
        verdict(f"graph turn {turn}: 25 replays", f"{bad.item()} gradients differ" if bad.item() else None)


def part_many():
    """Sequences without number: every one against float64, those of one length together."""
    for family, d, count, most, det, heads in (
        ("sm90", 64, 65536, 130, False, (2, 1)),
        ("sm90", 64, 65536, 130, True, (2, 2)),
        ("sm90", 256, 6000, 130, True, (2, 1)),
        ("sm80", 128, 20000, 130, True, (2, 1)),
        ("sm80", 64, 20000, 130, False, (2, 1)),
    ):
        if GPU and family not in families():
            continue
        where = f"many {family} d{d} {count} sequences det={det}"
        if not GPU:
            family, count, most = None, 50, 9
        try:
            gen = torch.Generator().manual_seed(SEED)
            lengths = torch.randint(1, most + 1, (count,), generator=gen)
            cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            total, (hq, hk) = int(cu[-1]), heads
            on_gpu = torch.Generator(DEV).manual_seed(SEED)
            rand = lambda h: torch.randn(total, h, d, generator=on_gpu, device=DEV, dtype=torch.float32).bfloat16()  # noqa: E731
            q, dout, k, v = rand(hq), rand(hq), rand(hk), rand(hk)
            options = {"causal": True, "family": family}
            offsets = cu.int().to(DEV)
            out, lse = OPS._forward_varlen(q, k, v, offsets, None, **options)
            got = OPS._backward_varlen(dout, None, q, k, v, out, lse, offsets, None, **options, deterministic=det)
            for length in [int(x) for x in lengths.unique()][:: 1 if count > 6000 or not GPU else 4]:
                which = (lengths == length).nonzero()[:, 0]
                rows = (cu[which].unsqueeze(1) + torch.arange(length)).to(DEV)  # (n, length)
                take = lambda x: x[rows].transpose(1, 2)  # noqa: E731
                one = take(q), take(k), take(v), take(dout), None
                oracle = reference.backward(*one, causal=True)
                yard = reference.backward(*one, causal=True, dtype=torch.bfloat16)
                for name, ours, *two in zip("qkv", got, yard, oracle):
                    verdict(f"{where} length {length} d{name}", apart(take(ours), *two, torch.bfloat16, terms=length * hq))
            del q, k, v, dout, out, lse, got
        except Exception as error:  # noqa: BLE001
            verdict(where, f"{type(error).__name__}: {str(error)[:300]}")
            if "CUDA error" in str(error):
                raise
        if GPU:
            torch.cuda.empty_cache()


def part_long():
    long = 100_003 if GPU else 307
    for family in families():
        for d in (64, 128, 192, 256):
            for sq, sk, hq, hk, kinds in (
                (1, long, 8, 2, {}),
                (1, long, 4, 4, {"causal": True}),
                (3, long, 6, 2, {"window": (1000, 1)}),
                (long, 1, 2, 1, {}),
                (long, 2, 2, 2, {"causal": True}),
                (long, 70, 2, 1, {"window": (5, 0)}),
                (long // 3, 1, 4, 1, {"causal": True}),
            ):
                for det in (False, True):
                    where = f"long {family} d{d} sq{sq} sk{sk} hq{hq} hk{hk} {kinds} det={det}"
                    try:
                        q, dout = (torch.randn(1, hq, sq, d, device=DEV, dtype=torch.bfloat16) for _ in range(2))
                        k, v = (torch.randn(1, hk, sk, d, device=DEV, dtype=torch.bfloat16) for _ in range(2))
                        left, right = kinds.get("window", (None, None))
                        options = dict(causal=kinds.get("causal", False), window_left=left, window_right=right, family=family)
                        out, lse = OPS._forward(q, k, v, **options)
                        got = OPS._backward(dout, None, q, k, v, out, lse, **options, deterministic=det)
                        oracle = reference.backward(q, k, v, dout, None, **kinds)
                        yard = reference.backward(q, k, v, dout, None, **kinds, dtype=torch.bfloat16)
                        for name, *three in zip("qkv", got, yard, oracle):
                            verdict(f"{where} d{name}", apart(*three, torch.bfloat16, terms=max(sq * hq // hk, sk), keys=sk))
                    except Exception as error:  # noqa: BLE001
                        verdict(where, f"{type(error).__name__}: {str(error)[:300]}")
                        if "CUDA error" in str(error):
                            raise


def part_large():
    """Beyond 2^31 elements, heads side by side and not."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 72e9:
        say("large: not enough memory")
        return
    b, h, s, d = 3, 4097, 1400, 128
    for family in families():
        for side_by_side in (False, True):
            rand = lambda: (  # noqa: E731
                torch.empty(b, s, h, d, dtype=torch.bfloat16, device=DEV).normal_().transpose(1, 2)
                if side_by_side
                else torch.empty(b, h, s, d, dtype=torch.bfloat16, device=DEV).normal_()
            )
            where = f"large {family} heads side by side={side_by_side}"
            try:
                q, k, v, dout = rand(), rand(), rand(), rand()
                out, lse = OPS._forward(q, k, v, True, family=family)
                got = OPS._backward(dout, None, q, k, v, out, lse, True, family=family)
                for at in ((0, slice(0, 2)), (1, slice(2000, 2002)), (2, slice(-2, None))):
                    one = [x[at[0] : at[0] + 1, at[1]] for x in (q, k, v, dout)]
                    oracle = reference.backward(*one, None, causal=True)
                    yard = reference.backward(*one, None, causal=True, dtype=torch.bfloat16)
                    for name, g, *two in zip("qkv", got, yard, oracle):
                        verdict(f"{where} {at} d{name}", apart(g[at[0] : at[0] + 1, at[1]], *two, torch.bfloat16))
            except Exception as error:  # noqa: BLE001
                verdict(where, f"{type(error).__name__}: {str(error)[:300]}")
                if "CUDA error" in str(error):
                    raise
            q = k = v = dout = out = lse = got = one = g = None
            torch.cuda.empty_cache()


def part_empty():
    for family in families():
        for b, hq, hk, sq, sk in (
            (0, 2, 2, 5, 5), (2, 0, 0, 5, 5), (2, 2, 2, 0, 5), (2, 2, 2, 5, 0), (2, 2, 1, 0, 0), (1, 1, 1, 1, 1)
        ):  # fmt: skip
            for det in (False, True):
                for d in (8, 64, 100, 256):
                    for causal in (False, True):
                        where = f"empty {family} {b, hq, hk, sq, sk} d{d} det={det}"
                        try:
                            q = torch.randn(b, hq, sq, d, device=DEV, dtype=torch.float16)
                            k = torch.randn(b, hk, sk, d, device=DEV, dtype=torch.float16)
                            out, lse = OPS._forward(q, k, k, causal, family=family)
                            got = OPS._backward(q, lse * 0, q, k, k, out, lse, causal, deterministic=det, family=family)
                            ok = all(g.shape == x.shape and g.isfinite().all() for g, x in zip(got, (q, k, k)))
                            verdict(where, None if ok else "a gradient is not finite or has another shape")
                        except Exception as error:  # noqa: BLE001
                            verdict(where, f"{type(error).__name__}: {str(error)[:300]}")
        # by autograd, for some inputs alone
        for needs in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1)):
            for det in (False, True):
                where = f"autograd {family} needs {needs} det={det}"
                try:
                    gen = torch.Generator(DEV).manual_seed(3)
                    q, k, v = (torch.randn(2, 2, 150, 64, generator=gen, device=DEV).bfloat16() for _ in range(3))
                    whole = [x.clone().requires_grad_() for x in (q, k, v)]
                    part = [x.clone().requires_grad_(bool(n)) for x, n in zip((q, k, v), needs)]
                    options = dict(causal=True, deterministic=True, family=family)
                    flash_cute.attention(*whole, **options).square().sum().backward()
                    flash_cute.attention(*part, **dict(options, deterministic=det)).square().sum().backward()
                    for x, y, n, name in zip(whole, part, needs, "qkv"):
                        if n:
                            near = torch.equal(x.grad, y.grad) if det else torch.allclose(x.grad, y.grad, 0.05, 0.02)
                            verdict(f"{where} d{name}", None if near else "differs from all three together")
                        else:
                            verdict(f"{where} d{name}", None if y.grad is None else "a gradient nobody asked for")
                except Exception as error:  # noqa: BLE001
                    verdict(where, f"{type(error).__name__}: {str(error)[:300]}")


def plain(x, dtype, scale, hidden):
    scores = (x.to(dtype) * scale).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).masked_fill(hidden, 0), scores.logsumexp(-1)


def softmax_case(where, x, scale=1.0, causal=False, finite_rows_only=False, dp_like=None, **lengths):
    """Values and gradients; what is hidden is NaN, and rows with NaN or inf are only compared by their places."""
    hidden = hidden_columns(x.shape, causal, lengths.get("seqused_k"), lengths.get("leftpad_k"), x.device)
    dirty = x
    if hidden.any():
        dirty = x.masked_fill(hidden, torch.nan)
        if dirty.stride() != x.stride():
            x.copy_(dirty)
            dirty = x
    p, lse = OPS._softmax(dirty, scale, causal, **lengths)
    clean = dirty.masked_fill(hidden, 0)
    oracle = plain(clean, torch.float64, scale, hidden)
    yard = plain(clean, x.dtype, scale, hidden)
    per_row = lambda amplitude: 1 / amplitude.double().nan_to_num(1, 1, 1).amax(-1, keepdim=True).clamp_min(1e-30)  # noqa: E731
    if x.numel():
        verdict(where + " p", apart(*(y.double() * per_row(oracle[0]) for y in (p, yard[0], oracle[0])), x.dtype))
    verdict(where + " lse", apart(lse, yard[1], oracle[1], torch.float32 if x.dtype == torch.float32 else x.dtype))
    sums = p.double().sum(-1)
    good = oracle[1].isfinite()
    if good.any() and x.shape[-1] <= 4096:
        off = (sums[good] - 1).abs().max().item()
        verdict(where + " sums", f"a row sums to 1 +- {off:.3e}" if off > 40 * EPS[x.dtype] + 1e-5 else None)
    dp = torch.randn(x.shape, device=x.device).to(x.dtype) if dp_like is None else dp_like
    dlse = torch.randn(x.shape[:-1], device=x.device)
    kept = p if x.dtype == torch.float32 else dirty
    for has_dp, has_dlse in ((True, True), (True, False), (False, True)):
        dx = OPS._softmax_backward(dp if has_dp else None, dlse if has_dlse else None, kept, scale, causal, **lengths)
        results = []
        for dtype in (x.dtype, torch.float64):
            P = oracle[0].to(dtype) if dtype == torch.float64 else yard[0]
            g = dp.to(dtype).masked_fill(hidden, 0) if has_dp else torch.zeros_like(P)
            shift = dlse.to(dtype).unsqueeze(-1) if has_dlse else 0
            results.append((scale * P * (g - (P * g).sum(-1, keepdim=True) + shift)).masked_fill(hidden, 0))
        rows = good.unsqueeze(-1)
        dx, *results = (y.where(rows, 0) for y in (dx, *results))
        P, g = oracle[0].where(rows, 0), dp.double().masked_fill(hidden, 0).abs() * has_dp
        size = scale * P * (g + (P * g).sum(-1, keepdim=True) + dlse.double().unsqueeze(-1).abs() * has_dlse)
        three = (y.double() * per_row(size) for y in (dx, *results))
        verdict(f"{where} dx given={has_dp, has_dlse}", apart(*three, x.dtype))


def part_softmax(limit=7.0):
    begin, rng = time.time(), random.Random(f"{SEED} softmax")
    fixed = [1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 255, 256, 257, 511, 513, 1023, 1025, 2047, 2049, 4095, 4097]
    long = [8191, 8193, 16383, 16384, 16385, 16391, 32767, 32768, 32769, 32775, 50257, 65535, 65536, 65537, 65543]
    long += [100_003, 131_072, 131_073, 262_147, 524_289, 1_000_000, 1_000_001, 1_048_576]
    sizes = [(n, True) for n in fixed + (long if GPU else [5000])]
    sizes += [(max(1, int(2 ** (rng.random() * (20 if GPU else 11)))), False) for _ in range(int(170 * SCALE) + 1)]
    for i, (columns, _) in enumerate(sizes):
        if time.time() - begin > limit and GPU:
            say(f"softmax: stopped after {i} of {len(sizes)}")
            break
        for dtype in (torch.float32, torch.bfloat16, torch.float16) if i < len(fixed) + len(long) else (
            rng.choice((torch.float32, torch.bfloat16, torch.float16)),
        ):  # fmt: skip
            most = max(1, min(3000 if columns < 300 else 40, 2_000_000 // columns))
            b, h, r = rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, max(1, most // 3))
            kind = rng.choice(("plain", "plain", "slice", "slice", "odd stride", "expanded", "transposed"))
            begin_at, more = rng.randint(0, 9), rng.randint(0, 9)
            where = f"softmax #{i} {columns} columns ({b}, {h}, {r}) {dtype} {kind} {begin_at, more}"
            try:
                if kind == "slice":
                    room = torch.full((b, h, r, columns + begin_at + more), torch.nan, device=DEV, dtype=dtype)
                    x = room[..., begin_at : begin_at + columns]
                elif kind == "odd stride":
                    room = torch.full((b * h * r * (columns + more) + begin_at,), torch.nan, device=DEV, dtype=dtype)
                    x = room[begin_at:].view(b, h, r, columns + more)[..., :columns]
                elif kind == "transposed":
                    x = torch.empty(b, r, h, columns, device=DEV, dtype=dtype).transpose(1, 2)
                else:
                    x = torch.empty(b, h, r, columns, device=DEV, dtype=dtype)
                size = rng.choice((1.0, 3.0, 30.0))
                x.copy_(torch.randn(x.shape, device=DEV) * size)
                if kind == "expanded":
                    x = x[:, :, :1].expand(b, h, r, columns)
                dp = None
                if rng.random() < 0.3:  # gradients that lie elsewhere
                    dp = torch.randn(b, h, r, columns + 3, device=DEV).to(dtype)[..., 1 : columns + 1]
                options = {"scale": rng.choice((1.0, 0.125, 2.5))}
                if rng.random() < 0.3:
                    options["causal"] = True
                if rng.random() < 0.3:
                    options["seqused_k"] = int32([rng.randint(-3, columns + 3) for _ in range(b)])
                if rng.random() < 0.3:
                    options["leftpad_k"] = int32([rng.randint(-3, columns) for _ in range(b)])
                if kind == "expanded" and len(options) > 1:
                    x = x.contiguous()
                softmax_case(f"{where} {options.keys()}", x, dp_like=dp, **options)
            except Exception as error:  # noqa: BLE001
                verdict(where, f"{type(error).__name__}: {str(error)[:300]}")
                if "CUDA error" in str(error):
                    raise
    for columns in (1, 5, 64, 100, 1000, 1024, 5000, 16384, 40_001, 131_072, 300_000)[: 11 if GPU else 6]:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for name in (
                *("some -inf", "all -inf", "one NaN", "one inf", "huge", "hugely negative", "equal", "one high"),
                *("beyond 2^31", "rows of the lowest number"),
            ):
                where = f"softmax {columns} columns {dtype} {name}"
                try:
                    x = torch.randn(6, columns, device=DEV).to(dtype)
                    top = 6e4 if dtype == torch.float16 else 1e8
                    j = rng.randrange(columns)
                    if name == "some -inf":
                        x[:, torch.rand(columns, device=DEV) < 0.7] = -torch.inf
                        x[:, j] = 0.5
                    elif name == "all -inf":
                        x[2] = -torch.inf
                        x[3, : columns // 2] = -torch.inf
                    elif name == "one NaN":
                        x[1, j] = torch.nan
                    elif name == "one inf":
                        x[4, j] = torch.inf
                    elif name == "huge":
                        x[0] *= 1e4
                        x[1, j] = top
                    elif name == "hugely negative":
                        x[0] = -top
                        x[1] = -top
                        x[1, j] = 3
                    elif name == "equal":
                        x[:] = x[:, :1]
                    elif name == "beyond 2^31":
                        x[0], x[1] = (-6e4, -6e4) if dtype == torch.float16 else (-1e10, -1e30)
                        x[2, j] = 6e4 if dtype == torch.float16 else 1e12
                    elif name == "rows of the lowest number":  # as additive masks leave of a row that sees nothing
                        x[0] = torch.finfo(dtype).min
                    else:
                        x[:, j] = 80
                    softmax_case(where, x)
                except Exception as error:  # noqa: BLE001
                    verdict(where, f"{type(error).__name__}: {str(error)[:300]}")
                    if "CUDA error" in str(error):
                        raise
    for shape in ((0, 5), (5, 0), (0, 0), (3, 0, 7), (3, 7, 0), (0,), (7,)):
        for dtype in (torch.float32, torch.bfloat16):
            where = f"softmax of shape {shape} {dtype}"
            try:
                x = torch.randn(*shape, device=DEV).to(dtype)
                p, lse = flash_cute.softmax(x)
                ok = p.shape == x.shape and lse.shape == x.shape[:-1]
                ok = ok and (shape[-1] > 0 or bool(lse.isneginf().all()))
                verdict(where, None if ok else "shapes, or an LSE that is not -inf")
                OPS._softmax_backward(p, lse, p if dtype == torch.float32 else x)
                sync()
            except Exception as error:  # noqa: BLE001
                verdict(where, f"{type(error).__name__}: {str(error)[:300]}")
    if not GPU:
        return
    # Rows shared by thread blocks, on several streams at once and beside attention that fills the GPU.
    xs = [torch.randn(40, n, device=DEV, dtype=t) for n, t in ((1_000_000, torch.bfloat16), (300_001, torch.float32))]
    expected = []
    for x in xs:
        p, lse = OPS._softmax(x)
        kept = p if x.dtype == torch.float32 else x
        expected.append((p, lse, kept, OPS._softmax_backward(p, lse, kept)))
    q = torch.randn(2, 16, 4096, 128, device=DEV, dtype=torch.bfloat16)
    streams = [torch.cuda.Stream() for _ in range(4)]
    bad = [torch.zeros((), dtype=torch.int64, device=DEV) for _ in streams]
    sync()
    for n in range(24):
        s = n % 4
        with torch.cuda.stream(streams[s]):
            if s == 3:
                OPS._forward(q, q, q)
                continue
            x, (p, lse, kept, dx) = xs[n % 2], expected[n % 2]
            got = OPS._softmax(x)
            bad[s] += (got[0] != p).any() | (got[1] != lse).any()
            bad[s] += (OPS._softmax_backward(p, lse, kept) != dx).any()
    sync()
    n = sum(bad).item()
    verdict("softmax on streams", f"{n} results differ from those alone" if n else None)


def part_jax_bound():
    """The bound that JAX allocates by, against the plan on this GPU."""
    path = os.path.join(os.path.dirname(flash_cute.__file__), "_jax.so")
    ask = ctypes.CDLL(path).flash_cute_jax_workspace
    ask.argtypes = [ctypes.c_bool] * 2 + [ctypes.c_int] * 6 + [ctypes.c_bool] * 2
    ask.restype = ctypes.c_int64
    rng = random.Random(f"{SEED} jax")
    for _ in range(150):
        b, hk, group = rng.randint(1, 40), rng.randint(1, 8), rng.randint(1, 8)
        sq, sk, d = rng.randint(1, 5000), rng.randint(1, 5000), rng.randint(1, 256)
        det, has_lengths = rng.random() < 0.5, rng.random() < 0.5
        q = torch.empty(1, device=DEV, dtype=torch.bfloat16).expand(b, hk * group, sq, d)
        k = torch.empty(1, device=DEV, dtype=torch.bfloat16).expand(b, hk, sk, d)
        lengths = {"seqused_q": int32([sq] * b)} if has_lengths else {}
        bound = ask(True, False, b, hk * group, hk, sq, sk, d, has_lengths, det)
        for family in families():
            plan = json.loads(OPS.plan(q, k, k, backward=True, deterministic=det, family=family, **lengths))
            ok = plan["workspace_bytes"] <= bound
            verdict(f"jax bound {b, hk * group, hk, sq, sk, d} {family}", None if ok else f"{plan['workspace_bytes']} > {bound}")
            if b % 2 == 0:  # vmap of 2
                half = ask(True, False, b // 2, hk * group, hk, sq, sk, d, has_lengths, det)
                ok = plan["workspace_bytes"] <= 2 * half
                verdict(f"jax bound under vmap {b, hk, sq, sk, d}", None if ok else f"{plan['workspace_bytes']} > 2 * {half}")


WILD = [
    ([0, 300, 100, 150], [0, 200, 400, 600]),  # offsets of queries out of order, of keys not
    ([0, 600, 0, 1], [0, 300, 300, 600]),
    ([599, 0, 600, 10], [0, 10, 500, 600]),
    ([0, 600, 100, 130], [0, 600, 600, 600]),
]


def wild():
    """In a process of its own: it may hang. Offsets that make no sense, deterministic, memory full of -1."""
    for family in families():
        for d in (64, 128, 256):
            for cq, ck in WILD:
                for poisoned in (False, True):
                    torch.use_deterministic_algorithms(poisoned)
                    q, dout = (torch.randn(600, 4, d, device=DEV, dtype=torch.bfloat16) for _ in range(2))
                    k, v = (torch.randn(600, 2, d, device=DEV, dtype=torch.bfloat16) for _ in range(2))
                    out, lse = OPS._forward_varlen(q, k, v, int32(cq), int32(ck), family=family)
                    poison()
                    print(f"{family} d{d} cu_seqlens_q={cq} cu_seqlens_k={ck} poisoned={poisoned}", flush=True)
                    OPS._backward_varlen(
                        dout, None, q, k, v, out, lse, int32(cq), int32(ck), family=family, deterministic=True
                    )
                    sync()
    print("no hang", flush=True)


def part_wild():
    """Last, as a kernel that hangs keeps the GPU until its process is gone."""
    command = [sys.executable, os.path.abspath(__file__), "--wild"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        text, _ = process.communicate(timeout=20 if GPU else 120)
        done = "no hang" in text
        verdict("wild offsets", None if done else f"rc {process.returncode}: {text[-400:]}")
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        last = (text.strip().splitlines() or ["(nothing)"])[-1]
        verdict("wild offsets", f"HANGS (killed after 20 s) at: {last}")


PARTS = {
    "empty": part_empty,
    "dense": part_dense,
    "ragged": part_ragged,
    "deterministic": part_deterministic,
    "long": part_long,
    "many": part_many,
    "softmax": part_softmax,
    "graphs": part_graphs,
    "streams": part_streams,
    "busy": part_busy,
    "jax": part_jax_bound,
    "large": part_large,
    "wild": part_wild,
}
NEEDS_GPU = {"graphs", "streams", "busy", "jax", "large"}


def main():
    torch.manual_seed(SEED)
    wanted = sys.argv[1:] or list(PARTS)
    where = torch.cuda.get_device_name() if GPU else "cpu"
    say(f"hostile: {flash_cute.__file__} on {where}, torch {torch.__version__}, families {families()}, seed {SEED}")
    for name in wanted:
        if name in NEEDS_GPU and not GPU:
            say(f"{name}: needs a GPU")
            continue
        begin, before = time.time(), (checks, failures)
        try:
            PARTS[name]()
            sync()
        except BaseException as error:  # noqa: BLE001
            verdict(name, f"the part ended with {type(error).__name__}: {str(error)[:500]}")
            say(traceback.format_exc(limit=4))
            if isinstance(error, KeyboardInterrupt):
                break
        if GPU:
            try:
                torch.cuda.empty_cache()
            except Exception as error:  # noqa: BLE001
                say(f"{name}: the device is lost: {str(error)[:200]}")
        say(f"{name}: {checks - before[0]} checks, {failures - before[1]} failures, {time.time() - begin:.1f} s")
    say(f"hostile: {checks} checks, {failures} failures ({time.time() - BEGIN:.0f} s)")
    return failures > 0


if __name__ == "__main__":
    if "--wild" in sys.argv:
        wild()
    else:
        sys.stdout.flush()
        sys.exit(main())
