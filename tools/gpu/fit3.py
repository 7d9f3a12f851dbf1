import os, sys, torch, statistics
sys.path[:0]=[os.getcwd()]
import flash_cute
from benchmarks import timing
torch.ops.load_library("build/gpu/bwlibs/d5.so")
dev=torch.device("cuda")
D=128; H=16
for causal in (False,True):
    for S,B in ((512,32),(512,128),(2048,8)):
            q,k,v=(torch.randn(B*S,H,D,device=dev,dtype=torch.bfloat16) for _ in range(3))
            cu=torch.arange(0,B*S+1,S,device=dev,dtype=torch.int32)
            d=[x.view(B,S,H,D).transpose(1,2) for x in (q,k,v)]
            o1=flash_cute.forward(*d,causal)[0]; o2=torch.ops.flash_cute_d5._forward(*d,causal)[0]
            assert torch.equal(o1,o2)
            f={"dense":lambda: flash_cute.forward(*d,causal),"packed":lambda: flash_cute.forward_varlen(q,k,v,cu,causal=causal),"dense5d":lambda: torch.ops.flash_cute_d5._forward(*d,causal)}
            got=timing.burst(f,dev,0.2)
            t={n:statistics.median(x) for n,x in got.items()}
            print(causal,S,B,{n:round(x,2) for n,x in t.items()},flush=True)
