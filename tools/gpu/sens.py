import os, sys, torch
sys.path.insert(0, os.getcwd())
import flash_cute
torch.ops.load_library("build/gpu/bwlibs/r1.so"); dev="cuda"
racy=torch.ops.flash_cute_r1._softmax.default; good=torch.ops.flash_cute._softmax.default
def run(op, dt, rows, cols, n, scale=1.0):
    g=torch.Generator(dev).manual_seed(1)
    src=[torch.randn(rows,cols,device=dev,generator=g).to(dt)*3 for _ in range(4)]
    exp=[good(good(s,1.0,False,None,None)[0],3.0,False,None,None)[0] for s in src]
    torch.cuda.synchronize(); x=torch.empty_like(src[0]); bad=torch.zeros(4,device=dev,dtype=torch.int64)
    for i in range(n):
        x.copy_(src[i%4]); p=op(x,1.0,False,None,None)[0]; x.zero_(); w=op(p,3.0,False,None,None)[0]; del p
        bad[i%4]+=(w!=exp[i%4]).any()
    return int(bad.sum())
for dt in (torch.float32, torch.bfloat16):
    for rows,cols in ((64,1024),(512,1024),(512,1000),(132,512),(4096,32),(8192,32),(1000,512),(64,8192),(2000,2048)):
        print(dt, rows, cols, "racy", run(racy,dt,rows,cols,3000), "good", run(good,dt,rows,cols,3000), flush=True)
def chain(op, dt, rows, cols, n):
    g=torch.Generator(dev).manual_seed(1); s=torch.randn(rows,cols,device=dev,generator=g).to(dt)*3
    def go():
        y=s
        for _ in range(6): y=op(y,2.0,False,None,None)[0]
        return y
    want=[None]; torch.cuda.synchronize(); y=s
    for _ in range(6): y=good(y,2.0,False,None,None)[0]; torch.cuda.synchronize()
    bad=torch.zeros((),device=dev,dtype=torch.int64); s0=s.clone()
    for i in range(n):
        bad+=(go()!=y).any()
    return int(bad)
for dt in (torch.float32, torch.bfloat16):
    for rows,cols in ((64,1024),(512,1024),(512,1000),(132,512),(4096,32),(64,8192),(2000,2048)):
        print("chain", dt, rows, cols, "racy", chain(racy,dt,rows,cols,1000), "good", chain(good,dt,rows,cols,1000), flush=True)
