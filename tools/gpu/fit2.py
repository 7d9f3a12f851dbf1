import os, sys, torch, statistics, random, math
sys.path[:0]=[os.getcwd()]
import flash_cute
from benchmarks import timing
dev=torch.device("cuda"); print(flash_cute.__file__)
def lens(kind):
    r=random.Random(0)
    if kind=="equal": return [512]*32
    if kind=="equal2k": return [2048]*8
    if kind=="lognormal":
        o=[]
        while sum(o)<32768: o.append(max(1,min(4096,int(512*math.exp(r.gauss(0,1))))))
        return o
    if kind=="uniform":
        o=[]
        while sum(o)<32768: o.append(r.randint(1,4096))
        return o
COMBOS=[("1000000","132"),("2","132"),("3","132"),("4","132"),("2","0"),("3","0"),("4","0"),("-5","0")]
for D in (64,128):
    H=2048//D
    for causal in (True,False):
        for kind in ("equal","equal2k","lognormal","uniform"):
            L=lens(kind); T=sum(L)
            q,k,v=(torch.randn(T,H,D,device=dev,dtype=torch.bfloat16) for _ in range(3))
            cu=torch.tensor([0]+L,device=dev).cumsum(0).to(torch.int32)
            def mk(cr,st):
                def f():
                    os.environ["FC_CR"]=cr; os.environ["FC_ST"]=st
                    flash_cute.forward_varlen(q,k,v,cu,causal=causal)
                return f
            f={f"{a[:3]}/{b}":mk(a,b) for a,b in COMBOS if causal or b=="0" or a=="1000000"}
            if kind.startswith("equal"):
                d=[x.view(len(L),L[0],H,D).transpose(1,2) for x in (q,k,v)]
                f["dense"]=lambda: flash_cute.forward(*d,causal)
            got=timing.burst(f,dev,0.1)
            t={n:statistics.median(x) for n,x in got.items()}
            print(D,"causal" if causal else "full",kind,len(L),{n:round(x,1) for n,x in t.items()},flush=True)
