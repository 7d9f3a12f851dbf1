# padded beside packed of several libraries, and packed equal beside dense. LIBS, DIMS, SECS
import os, sys, statistics, torch
sys.path.insert(0, os.getcwd())
from benchmarks import timing
from benchmarks.lengths import draw
import flash_cute
torch.manual_seed(0); dev=torch.device("cuda")
libs=os.environ["LIBS"].split(); secs=float(os.environ.get("SECS","0.1"))
for n in libs:
    if n!="main": torch.ops.load_library(f"build/gpu/bwlibs/{n}.so")
ns=lambda n: torch.ops.flash_cute if n=="main" else getattr(torch.ops, f"flash_cute_{n}")
def show(what, f, pairs):
    got=timing.burst(f,dev,secs); u={n:statistics.median(x) for n,x in got.items()}
    print(what.ljust(22)+"  ".join(f"{n} {x:.1f}" for n,x in u.items())+"   "+"  ".join(f"{a}/{b} {u[b]/u[a]:.3f}" for a,b in pairs if a in u and b in u),flush=True)
for d in [int(x) for x in os.environ.get("DIMS","128 64").split()]:
    h=2048//d
    for kind in os.environ.get("KINDS","equal:512 lognormal:512 uniform:1:4096").split():
        l=list(draw(kind,16384)); t=sum(l); m=max(l); b=len(l)
        cu=torch.tensor([0]+list(torch.tensor(l).cumsum(0)),dtype=torch.int32,device=dev)
        used=torch.tensor(l,dtype=torch.int32,device=dev)
        q,k,v=(torch.randn(t,h,d,device=dev,dtype=torch.bfloat16) for _ in range(3))
        def pad(x):
            y=torch.zeros(b,m,h,d,device=dev,dtype=x.dtype)
            for i,n in enumerate(l): y[i,:n]=x[int(cu[i]):int(cu[i])+n]
            return y.transpose(1,2)
        pq,pk,pv=map(pad,(q,k,v))
        for causal in (False,True):
            f={}
            for n in libs:
                f[n+"-packed"]=(lambda op: lambda: op(q,k,v,cu,cu,causal))(ns(n)._forward_varlen)
                if kind.startswith("equal"): f[n+"-dense"]=(lambda op: lambda: op(pq,pk,pv,causal))(ns(n)._forward)
                else: f[n+"-padded"]=(lambda op: lambda: op(pq,pk,pv,causal,seqused_q=used,seqused_k=used))(ns(n)._forward)
            want=f[libs[0]+"-packed"]()
            for n in libs[1:]:
                g=f[n+"-packed"]()
                assert torch.equal(g[0],want[0]) and torch.equal(g[1],want[1]), n
            pairs=[(n+"-padded",n+"-packed") for n in libs]+[(n+"-packed",n+"-dense") for n in libs]
            show(f"d{d} {kind}{' c' if causal else ''} pad{b*m-t}",f,pairs)
