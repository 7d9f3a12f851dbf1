import os, sys, torch
sys.path[:0]=[os.getcwd(), os.getcwd()+"/tests"]
import flash_cute
from flash_cute import reference
L=os.environ["LIBS"]; torch.ops.load_library(f"build/gpu/bwlibs/{L}.so"); op=getattr(torch.ops,"flash_cute_"+L)._backward.default
dev="cuda"; bad=n=0
for rep in range(int(os.environ.get("REPS","6"))):
  for heads in ((3,3),(300,300),(6,2),(1000,1000)):
    for sq,sk in ((1,1),(1,1000),(64,64),(64,65),(30,200),(65,128),(300,449),(449,300)):
      for c in (False,True):
        if heads[0]==1000 and sq*sk>20000: continue
        torch.manual_seed(rep)
        q=torch.randn(2,sq,heads[0],256,device=dev,dtype=torch.bfloat16).transpose(1,2); k,v=(torch.randn(2,sk,heads[1],256,device=dev,dtype=torch.bfloat16).transpose(1,2) for _ in range(2))
        out,lse=flash_cute.forward(q,k,v,c); do=torch.randn_like(out); dl=torch.randn_like(lse)
        a=[op(do,dl,q,k,v,out,lse,c,deterministic=d) for d in (False,True,True)]
        ref=torch.ops.flash_cute._backward(do,dl,q,k,v,out,lse,c,family="sm80")
        for x in a:
            n+=1
            for g,r in zip(x,ref):
                e=((g.float()-r.float()).norm()/(r.float().norm()+1e-9)).item()
                if not e<0.02: bad+=1; print("BAD",heads,sq,sk,c,e,flush=True); break
        if not all(torch.equal(x,y) for x,y in zip(a[1],a[2])): bad+=1; print("not repeatable",heads,sq,sk,c)
print("checked",n,"bad",bad)
