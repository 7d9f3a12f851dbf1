import os, sys, statistics, torch
sys.path.insert(0, os.getcwd())
from benchmarks import timing
torch.manual_seed(0); dev = torch.device("cuda")
libs = os.environ["LIBS"].split(); secs=float(os.environ.get("SECS","0.1"))
for n in libs: torch.ops.load_library(f"build/gpu/bwlibs/{n}.so") if n!="main" else __import__("flash_cute")
ns=lambda n: torch.ops.flash_cute if n=="main" else getattr(torch.ops, f"flash_cute_{n}")
def lens(kind):
    g = torch.Generator().manual_seed(1)
    if kind == "equal512": return [512] * 32
    if kind == "equal2048": return [2048] * 8
    if kind == "uniform": return [int(x) for x in torch.randint(1, 4097, (8,), generator=g)]
    if kind == "outlier": return [32768] + [256] * 64
def show(what, f, first):
    got = timing.burst(f, dev, secs); u = {n: statistics.median(x) for n, x in got.items()}
    print(what.ljust(24) + "  ".join(f"{n} {x:.1f} ({u[first] / x:.3f})" for n, x in u.items()), flush=True)
for d in [int(x) for x in os.environ.get("DIMS","64 128").split()]:
    h = 2048 // d
    for s in (512, 2048, 16384):
        for causal in (False, True):
            q,k,v=(torch.randn(16384//s,s,h,d,device=dev,dtype=torch.bfloat16).transpose(1,2) for _ in range(3))
            f={n:(lambda op: lambda: op(q,k,v,causal))(ns(n)._forward) for n in libs}
            want=f[libs[0]](); 
            for n in libs[1:]:
                got=f[n](); e=((got[0].float()-want[0].float()).norm()/want[0].float().norm()).item(); l=(got[1]-want[1]).abs().max().item()
                if e>0 or l>0: print("   ",n,f"{e:.2e} lse {l:.2e}")
            show(f"dense d{d} {s} {'c' if causal else ''}", f, libs[0])
    for kind in os.environ.get("KINDS","equal512 equal2048 uniform outlier").split():
        for causal in (False, True):
            l = lens(kind); cu = torch.tensor([0] + list(torch.tensor(l).cumsum(0)), dtype=torch.int32, device=dev); t = sum(l)
            q, k, v = (torch.randn(t, h, d, device=dev, dtype=torch.bfloat16) for _ in range(3))
            f={n:(lambda op: lambda: op(q,k,v,cu,cu,causal))(ns(n)._forward_varlen) for n in libs}
            if kind.startswith("equal"):
                s = l[0]; dq, dk, dv = (x.view(len(l), s, h, d).transpose(1, 2) for x in (q, k, v))
                f["dense"] = lambda: ns(libs[0])._forward(dq, dk, dv, causal)
            show(f"d{d} {kind} {'c' if causal else ''}", f, libs[0])
