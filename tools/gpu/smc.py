import os, sys, statistics as st
sys.path.insert(0, os.getcwd())
import torch, flash_cute
from benchmarks import timing, softmax as B
dev = torch.device("cuda")
libs = os.environ["LIBS"].split()
for n in libs: torch.ops.load_library(f"build/gpu/bwlibs/{n}.so")
secs = float(os.environ.get("SECS", "0.15"))
cells = [c.split(":") for c in os.environ["CELLS"].split()]
for el, cols in cells:
    cols = int(cols); dt = B.DTYPES[el]; rows = 2**28 // dt.itemsize // cols
    x = torch.randn(rows, cols, device=dev).to(dt)
    f = {"base": lambda: torch.ops.flash_cute._softmax.default(x, 1.0, False, None, None)}
    for n in libs: f[n] = (lambda op: lambda: op(x, 1.0, False, None, None))(getattr(torch.ops, f"flash_cute_{n}")._softmax.default)
    want = f["base"]()
    for n in libs:
        got = f[n]()
        assert all(torch.equal(a, b) or (a.float() - b.float()).abs().max() < 1e-2 for a, b in zip(got, want)), n
    f["triton"] = B.triton_softmax(x)
    s = timing.burst(f, dev, secs)
    r = {n: timing.summary(timing.paired_speedups(s[n], s["triton"])) for n in f if n != "triton"}
    print(f"{el} {cols}: triton {st.median(s['triton']):.1f} us  " + "  ".join(f"{n} {v['median']:.4f}±{(v['q75'] - v['q25']) / 2:.4f}" for n, v in r.items()), flush=True)
