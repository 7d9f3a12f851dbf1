import os, statistics, sys, torch
sys.path.insert(0, os.getcwd())
import flash_cute
from benchmarks import timing
dev = torch.device("cuda"); torch.manual_seed(0)
libs=os.environ["LIBS"].split()
for n in libs: torch.ops.load_library(f"build/gpu/bwlibs/{n}.so")
A=torch.ops.aten
for d in [int(x) for x in os.environ.get("DIMS","64 128 256").split()]:
    for s in [int(x) for x in os.environ.get("SEQ","512 1024 2048 16384").split()]:
        for causal in (False,True):
            b,h=16384//s,2048//d
            q,k,v,do=(torch.randn(b,s,h,d,device=dev,dtype=torch.bfloat16).transpose(1,2) for _ in range(4))
            out,lse=flash_cute.forward(q,k,v,causal,family="sm80")
            r=A._scaled_dot_product_flash_attention(q,k,v,0.0,causal)
            f={"fa2":lambda: A._scaled_dot_product_flash_attention_backward(do,q,k,v,r[0],r[1],r[2],r[3],r[4],r[5],0.0,causal,r[6],r[7])}
            for n in libs: f[n]=(lambda op: lambda: op(do,None,q,k,v,out,lse,causal,family="sm80"))(getattr(torch.ops,f"flash_cute_{n}")._backward.default)
            want=f["fa2"]()
            for n in libs:
                g=f[n]()
                for x,y in zip(g,want):
                    e=((x.float()-y.float()).norm()/y.float().norm()).item(); assert e<8e-3,(n,d,s,causal,e)
            got=timing.burst(f,dev,float(os.environ.get("SECS","0.08"))); u={n:statistics.median(x) for n,x in got.items()}
            print(f"d{d} {s} {'c' if causal else ''}".ljust(14)+"  ".join(f"{n} {x:.0f} ({u['fa2']/x:.3f})" for n,x in u.items()),flush=True)
