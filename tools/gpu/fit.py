import os, sys, torch, statistics
sys.path[:0]=[os.getcwd()]
import flash_cute
from benchmarks import timing
dev=torch.device("cuda"); print(flash_cute.__file__)
D=128; H=16
for causal in (False,True):
    for S in (512,):
        for B in (8,16,32,64,80,128):
            q,k,v=(torch.randn(B*S,H,D,device=dev,dtype=torch.bfloat16) for _ in range(3))
            cu=torch.arange(0,B*S+1,S,device=dev,dtype=torch.int32)
            d=[x.view(B,S,H,D).transpose(1,2) for x in (q,k,v)]
            f={"dense":lambda: flash_cute.forward(*d,causal),"packed":lambda: flash_cute.forward_varlen(q,k,v,cu,causal=causal)}
            got=timing.burst(f,dev,0.15)
            t={n:statistics.median(x) for n,x in got.items()}
            print(causal,S,B,{n:round(x,2) for n,x in t.items()},"diff",round(t["packed"]-t["dense"],2),"ratio",round(t["dense"]/t["packed"],3),flush=True)
