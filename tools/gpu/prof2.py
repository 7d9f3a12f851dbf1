import os, sys, torch, collections
sys.path.insert(0, os.getcwd())
import flash_cute
libs = os.environ["LIBS"].split()
for n in libs[1:]: torch.ops.load_library(f"build/gpu/bwlibs/{n}.so")
from torch.profiler import profile, ProfilerActivity
for d in (int(x) for x in os.environ.get("DIMS", "64,128").split(",")):
    for s in (int(x) for x in os.environ.get("SEQ", "512,2048").split(",")):
        for causal in (False, True):
            b, h = 16384 // s, 2048 // d
            q, k, v, do = (torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
            for n in libs:
                op = torch.ops.flash_cute if n == "base" else getattr(torch.ops, f"flash_cute_{n}")
                out, lse = flash_cute.forward(q, k, v, causal)
                for _ in range(3): op._backward(do, None, q, k, v, out, lse, causal)
                torch.cuda.synchronize()
                with profile(activities=[ProfilerActivity.CUDA]) as p:
                    for _ in range(10): op._backward(do, None, q, k, v, out, lse, causal)
                    torch.cuda.synchronize()
                ev = sorted((e for e in p.events() if "backward" in e.name or "emset" in e.name), key=lambda e: e.time_range.start)
                t = collections.defaultdict(float)
                for e in ev: t[e.name.split("<")[0].split("::")[-1][-22:]] += e.time_range.elapsed_us() / 10
                print(f"d{d} {s} {'causal' if causal else 'full'} {n}: " + "  ".join(f"{k} {v:.1f}" for k, v in t.items()), f" span {(max(e.time_range.end for e in ev) - ev[0].time_range.start) / 10:.1f}", flush=True)
