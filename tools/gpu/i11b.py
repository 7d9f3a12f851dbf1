import os, statistics, sys, torch
sys.path.insert(0, os.getcwd())
import flash_cute
from benchmarks import timing
from benchmarks.problem import Problem
for n in ("old", "a", "b"): torch.ops.load_library(f"build/gpu/old/{n}.so")
dev = torch.device("cuda")
for causal, s in ((True, 512), (True, 1024), (True, 4096), (False, 512)):
    p = Problem(16384 // s, 32, 32, s, s, 64, causal=causal)
    q, k, v = p.inputs(dev)
    f = {"old": lambda: torch.ops.flash_cute_base.forward.default(q, k, v, causal),
         "a": lambda: torch.ops.flash_cute_a._forward.default(q, k, v, causal),
         "b": lambda: torch.ops.flash_cute_b._forward.default(q, k, v, causal),
         "old2": lambda: torch.ops.flash_cute_base.forward.default(q, k, v, causal)}
    got = timing.burst(f, dev, 1.5)
    line = f"causal={causal} s={s} old {statistics.median(got['old']):.1f}"
    for n in ("old2", "a", "b"):
        r = [x / y for x, y in zip(got["old"], got[n])]; qs = statistics.quantiles(r, n=4)
        line += f" | {n} {statistics.median(r):.4f} ({qs[0]:.4f}-{qs[2]:.4f})"
    print(line, flush=True)
