import os, sys, torch, statistics, random, math
sys.path[:0]=[os.getcwd()]
import flash_cute
from benchmarks import timing
for n in ("c1","c2","p40","p80","p300"): torch.ops.load_library(f"build/gpu/bwlibs/{n}.so")
dev=torch.device("cuda")
D=128; H=16
for causal in (False,True):
    for seed in (0,1):
        r=random.Random(seed); L=[]
        while sum(L)<16384: L.append(max(1,min(4096,int(512*math.exp(r.gauss(0,1))))))
        T=sum(L); S=max(L); B=len(L)
        q,k,v=(torch.randn(T,H,D,device=dev,dtype=torch.bfloat16) for _ in range(3))
        cu=torch.tensor([0]+L,device=dev).cumsum(0).to(torch.int32); u=torch.tensor(L,device=dev,dtype=torch.int32)
        p=[torch.randn(B,S,H,D,device=dev,dtype=torch.bfloat16).transpose(1,2) for _ in range(3)]
        f={"packed":lambda: flash_cute.forward_varlen(q,k,v,cu,causal=causal),"padded":lambda: flash_cute.forward(*p,causal,seqused_q=u,seqused_k=u)}
        for n in ("c1","c2","p40","p80","p300"):
            f[n]=(lambda op: lambda: op(*p,causal,seqused_q=u,seqused_k=u))(getattr(torch.ops,f"flash_cute_{n}")._forward.default)
        a=f["padded"]()[0]
        for n in ("c1","c2","p40","p80","p300"): assert torch.equal(a,f[n]()[0]), n
        got=timing.burst(f,dev,0.15)
        t={n:statistics.median(x) for n,x in got.items()}
        print(causal,B,S,{n:f"{x:.1f} {t['packed']/x:.3f}" for n,x in t.items()},"padding x",round(B*S/T,1),flush=True)
