import os,sys,torch; sys.path.insert(0,os.getcwd()); import flash_cute
from torch.profiler import profile, ProfilerActivity
L=os.environ["LIBS"].split()
for n in L:
    if n!="main": torch.ops.load_library(f"build/gpu/bwlibs/{n}.so")
ns=lambda n: torch.ops.flash_cute if n=="main" else getattr(torch.ops,"flash_cute_"+n)
def kernels(f):
    for _ in range(3): f()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(10): f()
        torch.cuda.synchronize()
    return {e.key.replace("void flash_cute::","").split("<")[0]: round(e.self_device_time_total/10,1) for e in p.key_averages() if e.self_device_time_total>1}
for d in (64,128):
  for c in (False,True):
    s=512;h=2048//d;b=16384//s
    q,k,v,do=(torch.randn(b,s,h,d,device="cuda",dtype=torch.bfloat16) for _ in range(4))
    cu=torch.arange(b+1,device="cuda",dtype=torch.int32)*s
    pq,pk,pv,pdo=(x.view(b*s,h,d) for x in (q,k,v,do)); tq,tk,tv,tdo=(x.transpose(1,2) for x in (q,k,v,do))
    out,lse=flash_cute.forward(tq,tk,tv,c); po,pl=flash_cute.forward_varlen(pq,pk,pv,cu,causal=c)
    for n in L:
        print(d,c,n,"dense",kernels(lambda: ns(n)._backward(tdo,None,tq,tk,tv,out,lse,c)),"packed",kernels(lambda: ns(n)._backward_varlen(pdo,None,pq,pk,pv,po,pl,cu,cu,c)),flush=True)
