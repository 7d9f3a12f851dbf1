"""d64 dense cells: the build before issue 11 (6b81f6b) against main, in turns."""
import json, os, statistics, sys, torch
sys.path.insert(0, os.getcwd())
torch.ops.load_library("build/gpu/old/old.so")
import flash_cute
from benchmarks import timing
from benchmarks.problem import Problem
dev = torch.device("cuda")
rows = []
for causal in (True, False):
    for s in (512, 1024, 2048, 4096, 16384):
        p = Problem(16384 // s, 32, 32, s, s, 64, causal=causal)
        q, k, v = p.inputs(dev)
        old = lambda: torch.ops.flash_cute_base.forward.default(q, k, v, causal)
        new = lambda: flash_cute.forward(q, k, v, causal)
        a, b = old(), new()
        same = torch.equal(a[0], b[0])
        got = timing.burst({"old": old, "new": new}, dev, 1.5)
        ratio = [x / y for x, y in zip(got["old"], got["new"])]
        qs = statistics.quantiles(ratio, n=4)
        line = f"causal={causal} s={s} old {statistics.median(got['old']):.1f} new {statistics.median(got['new']):.1f} ratio {statistics.median(ratio):.4f} iqr {qs[0]:.4f}-{qs[2]:.4f} n={len(ratio)} same={same}"
        print(line, flush=True)
