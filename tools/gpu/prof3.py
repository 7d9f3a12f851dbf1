import os, sys, torch, statistics
sys.path.insert(0, os.getcwd())
import flash_cute
from torch.profiler import profile, ProfilerActivity
torch.ops.load_library("build/gpu/bwlibs/pp.so"); op=torch.ops.flash_cute_pp._backward.default
dev="cuda"
for d in (64,128,256):
    s=512; b,h=16384//s,2048//d
    q,k,v,do=(torch.randn(b,s,h,d,device=dev,dtype=torch.bfloat16).transpose(1,2) for _ in range(4))
    out,lse=torch.ops.flash_cute._forward(q,k,v,False)
    for x in "012345":
        os.environ["FC_F"]=x
        for _ in range(3): op(do,None,q,k,v,out,lse,False)
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(12): op(do,None,q,k,v,out,lse,False)
            torch.cuda.synchronize()
        print(d,x,{e.key.split("::")[1].split("<")[0]:round(e.self_device_time_total/e.count,1) for e in p.key_averages() if "flash_cute" in e.key},flush=True)
