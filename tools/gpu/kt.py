import os, sys, torch
sys.path.insert(0, os.getcwd())
import flash_cute
from torch.profiler import profile, ProfilerActivity
libs = sys.argv[1].split(","); dims = [int(x) for x in sys.argv[2].split(",")]
for n in libs: torch.ops.load_library(f"build/gpu/bwlibs/{n}.so")
for d in dims:
  for causal, s in [(False, 512), (True, 512), (False, 2048)]:
    b, h = 16384 // s, 2048 // d
    q, k, v, do = (torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    out, lse = flash_cute.forward(q, k, v, causal)
    for n in libs:
        op = getattr(torch.ops, f"flash_cute_{n}")._backward.default
        for _ in range(3): op(do, None, q, k, v, out, lse, causal)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(10): op(do, None, q, k, v, out, lse, causal)
            torch.cuda.synchronize()
        print(n, d, "causal" if causal else "full", s, " ".join(f"{e.key.split('<')[0].split('::')[-1][:28]} {e.device_time:.0f}" for e in p.key_averages()), flush=True)
