import torch, time, statistics as st, os, sys
sys.path.insert(0, os.getcwd())
import flash_cute
from flash_cute import ops
from torch.nn.attention import SDPBackend, sdpa_kernel
B,H,N,D=[int(x) for x in os.environ.get("SHAPE","1,2,64,64").split(",")]
q,k,v=[torch.randn(B,H,N,D,device="cuda",dtype=torch.bfloat16,requires_grad=True) for _ in range(3)]
dout=torch.randn(B,H,N,D,device="cuda",dtype=torch.bfloat16)
with torch.no_grad():
    o,l=flash_cute.forward(q,k,v,True)
    qn,kn,vn=[x.detach() for x in (q,k,v)]
op=torch.ops.flash_cute._backward.default
fop=torch.ops.flash_cute._forward.default
a=torch.ops.aten._scaled_dot_product_flash_attention(qn,kn,vn,0.0,True)
fb=torch.ops.aten._scaled_dot_product_flash_attention_backward.default
opts={"softmax_scale": None, "window_left":None,"window_right":None, "family": None}
def ours(): return flash_cute.forward(q,k,v,True)[0]
def sdpa(): return torch.nn.functional.scaled_dot_product_attention(q,k,v,is_causal=True)
def step(f): return lambda: torch.autograd.grad(f(),(q,k,v),dout)
x=torch.randn(4,device="cuda",requires_grad=True); dx=torch.ones(4,device="cuda")
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx,q,k,v):
        o,l=fop(q,k,v,True); ctx.save_for_backward(q,k,v,o,l); ctx.set_materialize_grads(False); return o,l
    @staticmethod
    def backward(ctx,do,dl):
        q,k,v,o,l=ctx.saved_tensors
        return op(do,None,q,k,v,o,l,True)
ap=super(torch.autograd.Function,F).apply
fs={"fwd no grad":lambda: flash_cute.forward(qn,kn,vn,True),"fwd op":lambda: fop(qn,kn,vn,True),"fwd grad":ours,
 "sdpa fwd grad":sdpa,"lean fwd":lambda: ap(q,k,v)[0],
 "bwd op":lambda: op(dout,None,qn,kn,vn,o,l,True),"bwd op kwargs":lambda: op(dout,None,qn,kn,vn,o,l,causal=True,needs_dq=True,needs_dkv=True,deterministic=False,**opts),
 "aten flash bwd":lambda: fb(dout,qn,kn,vn,a[0],a[1],a[2],a[3],N,N,0.0,True,a[6],a[7]),
 "mul step":lambda: torch.autograd.grad(x*2,x,dx), "lean step":step(lambda: ap(q,k,v)[0]),"ours step":step(ours),"sdpa step":step(sdpa),
 "empty_like":lambda: torch.empty_like(q)}
res={n:[] for n in fs}
with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
  for r in range(40):
    for n,f in fs.items():
        torch.cuda.synchronize(); t=time.perf_counter()
        for _ in range(100): f()
        res[n].append((time.perf_counter()-t)*1e4); torch.cuda.synchronize()
print(f"{B},{H},{N},{D}: "+"  ".join(f"{n} {st.median(v_[5:]):.1f}" for n,v_ in res.items()), flush=True)
if os.environ.get("PROF"):
    from torch.profiler import profile, ProfilerActivity
    with profile(activities=[ProfilerActivity.CPU,ProfilerActivity.CUDA]) as p:
        for _ in range(20): op(dout,None,qn,kn,vn,o,l,True)
        torch.cuda.synchronize()
    print(p.key_averages().table(sort_by="cpu_time_total",row_limit=18,max_name_column_width=60))
