import os, sys, statistics, torch
sys.path.insert(0, os.getcwd())
from benchmarks import timing
from benchmarks.lengths import draw
torch.manual_seed(0); dev=torch.device("cuda")
torch.ops.load_library("build/gpu/bwlibs/rz.so"); op=torch.ops.flash_cute_rz._forward_varlen
for d in (64,96,128):
    h={64:32,96:16,128:16}[d]
    for kind in "uniform:1:512 uniform:1:1024 uniform:1:2048 uniform:1:4096 uniform:1:8192 uniform:256:768 lognormal:128 lognormal:256 lognormal:512 lognormal:1024 lognormal:2048 outlier:32768:256:64 outlier:8192:256:32 outlier:4096:512:24".split():
        l=list(draw(kind,16384)); t=sum(l)
        cu=torch.tensor([0]+list(torch.tensor(l).cumsum(0)),dtype=torch.int32,device=dev)
        q,k,v=(torch.randn(t,h,d,device=dev,dtype=torch.bfloat16) for _ in range(3))
        s=""
        for causal in (False,True):
            f={}
            for n in "sma":
                def call(n=n):
                    if n=="a": os.environ.pop("FC_T",None)
                    else: os.environ["FC_T"]=n
                    return op(q,k,v,cu,cu,causal)
                f[n]=call
            got=timing.burst(f,dev,0.05); u={n:statistics.median(x) for n,x in got.items()}
            s+=f"  {'c' if causal else 'full'} small {u['s']:.0f} main {u['m']:.0f} auto {u['a']:.0f} ratio main/small speed {u['s']/u['m']:.3f}"
        print(d,kind,len(l),t,s,flush=True)
