import os, sys, statistics as st
sys.path.insert(0, os.getcwd())
import torch, flash_cute
from benchmarks import timing, softmax as B
dev = torch.device("cuda")
libs = os.environ["LIBS"].split()
for n in libs: torch.ops.load_library(f"build/gpu/bwlibs/{n}.so")
secs = float(os.environ.get("SECS", "0.15"))
def show(head, s, ref):
    r = {n: timing.summary(timing.paired_speedups(s[n], s[ref])) for n in s if n != ref}
    print(f"{head}: {ref} {st.median(s[ref]):.1f} us  " + "  ".join(f"{n} {v['median']:.4f}±{(v['q75'] - v['q25']) / 2:.4f}" for n, v in r.items()), flush=True)
for c in os.environ["CELLS"].split():
    el, cols, *what = c.split(":")
    cols = int(cols); dt = B.DTYPES[el]; rows = 2**28 // dt.itemsize // cols
    x = torch.randn(rows, cols, device=dev).to(dt)
    ops = {n: getattr(torch.ops, f"flash_cute_{n}") for n in libs}
    if not what or "f" in what:
        f = {n: (lambda op: lambda: op(x, 1.0, False, None, None))(ops[n]._softmax.default) for n in libs}
        want = torch.softmax(x.float(), -1)
        for n in libs:
            got = f[n]()
            assert (got[0].float() - want).abs().max() < 1e-2, n
        del want, got
        f["triton"] = B.triton_softmax(x)
        show(f"{el} {cols} fwd", timing.burst(f, dev, secs), "triton")
    if "b" in what:
        g = torch.randn_like(x); kept = x.softmax(-1) if el == "fp32" else x
        f = {n: (lambda op: lambda: op(g, None, kept))(ops[n]._softmax_backward.default) for n in libs}
        show(f"{el} {cols} bwd", timing.burst(f, dev, secs), libs[0])
