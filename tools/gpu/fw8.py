import os, sys, statistics, torch
sys.path.insert(0, os.getcwd())
from benchmarks import timing
import flash_cute
torch.manual_seed(0); dev = torch.device("cuda")
libs = os.environ["LIBS"].split(); secs=float(os.environ.get("SECS","0.06"))
for n in libs: torch.ops.load_library(f"build/gpu/bwlibs/{n}.so")
ns=lambda n: getattr(torch.ops, f"flash_cute_{n}")
from benchmarks.lengths import draw
L=lambda k: list(draw(k,16384))
def show(what, f):
    got = timing.burst(f, dev, secs); u = {n: statistics.median(x) for n, x in got.items()}
    print(what.ljust(22) + "  ".join(f"{n} {x:.0f} ({u['fa2'] / x:.3f})" for n, x in u.items()), flush=True)
for d in [int(x) for x in os.environ.get("DIMS","64").split()]:
    h = 2048 // d
    for s in [int(x) for x in os.environ.get("SEQ","512 1024 2048 4096 16384").split()]:
        for causal in (False, True):
            q,k,v=(torch.randn(16384//s,s,h,d,device=dev,dtype=torch.bfloat16).transpose(1,2) for _ in range(3))
            f={n:(lambda op: lambda: op(q,k,v,causal,family="sm80"))(ns(n)._forward) for n in libs}
            f["fa2"]=lambda: torch.ops.aten._scaled_dot_product_flash_attention(q,k,v,0.0,causal)
            want=f["fa2"]()[0]
            for n in list(libs):
                try: e=((f[n]()[0].float()-want.float()).norm()/want.float().norm()).item(); assert e<6e-3,(n,e)
                except Exception as x: print(n,d,str(x)[:100]); del f[n]
            show(f"d{d} {s} {'c' if causal else ''}", f)
    for kind in os.environ.get("KINDS","uniform:1:4096 lognormal:512 outlier:32768:256:64 equal:512 equal:2048").split():
        for causal in (False, True):
            l = L(kind); cu = torch.tensor([0] + list(torch.tensor(l).cumsum(0)), dtype=torch.int32, device=dev); t = sum(l); m=max(l)
            q, k, v = (torch.randn(t, h, d, device=dev, dtype=torch.bfloat16) for _ in range(3))
            f={n:(lambda op: lambda: op(q,k,v,cu,cu,causal,family="sm80"))(ns(n)._forward_varlen) for n in libs}
            f["fa2"]=lambda: torch.ops.aten._flash_attention_forward(q,k,v,cu,cu,m,m,0.0,causal,False)
            want=f["fa2"]()[0]
            for n in list(libs):
                try: e=((f[n]()[0].float()-want.float()).norm()/want.float().norm()).item(); assert e<6e-3,(n,e)
                except Exception as x: print(n,d,str(x)[:100]); del f[n]
            show(f"d{d} {kind} {'c' if causal else ''}", f)
