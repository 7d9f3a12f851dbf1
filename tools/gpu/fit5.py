import os, sys; sys.path.insert(0, os.getcwd())
import torch, flash_cute, statistics
dev="cuda"
def t(f):
    for _ in range(3): f()
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(40): f()
    r=[]
    for _ in range(9):
        a,b=torch.cuda.Event(True),torch.cuda.Event(True)
        a.record(); g.replay(); b.record(); b.synchronize(); r.append(a.elapsed_time(b)/40*1e3)
    return statistics.median(r)
for d in (64,128):
    for causal in (False,True):
        for h in (1,2,4,8,16):
            s=512;b=32
            q,k,v=(torch.randn(b*s,h,d,device=dev,dtype=torch.bfloat16) for _ in range(3))
            cu=torch.arange(0,b*s+1,s,device=dev,dtype=torch.int32)
            dq,dk,dv=(x.view(b,s,h,d).transpose(1,2) for x in (q,k,v))
            D=t(lambda: torch.ops.flash_cute._forward(dq,dk,dv,causal)); P=t(lambda: torch.ops.flash_cute._forward_varlen(q,k,v,cu,cu,causal))
            print(f"d{d} {'c' if causal else ''} h{h}: dense {D:.2f} packed {P:.2f} diff {P-D:.2f}",flush=True)
