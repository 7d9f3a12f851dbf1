import torch, time, statistics as st, sys, os
sys.path.insert(0, os.getcwd())
import flash_cute
from flash_cute import ops
torch.set_num_threads(1)
q,k,v=[torch.randn(1,2,64,64,dtype=torch.bfloat16,requires_grad=True) for _ in range(3)]
dout=torch.randn(1,2,64,64,dtype=torch.bfloat16)
O=torch.empty_like(dout); L=torch.empty(1,2,64); G=[torch.empty_like(dout) for _ in range(3)]
fake_f=lambda *a,**k:(O.detach(),L.detach())
fake_b=lambda *a,**k:tuple(g.detach() for g in G)
ops._forward=fake_f; ops._backward=fake_b
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx,q,k,v):
        o,l=fake_f(); ctx.save_for_backward(q,k,v,o,l); ctx.set_materialize_grads(False); return o,l
    @staticmethod
    def backward(ctx,do,dl):
        q,k,v,o,l=ctx.saved_tensors
        return fake_b()
class F2(torch.autograd.Function):
    @staticmethod
    def forward(q,k,v):
        return fake_f()
    @staticmethod
    def setup_context(ctx,inputs,output):
        ctx.save_for_backward(*inputs,*output); ctx.set_materialize_grads(False)
    @staticmethod
    def backward(ctx,do,dl):
        q,k,v,o,l=ctx.saved_tensors
        return fake_b()
ap=super(torch.autograd.Function,F).apply
ap2=super(torch.autograd.Function,F2).apply
def lean(): return ap(q,k,v)
def lean2(): return ap2(q,k,v)
def full(): return F.apply(q,k,v)
def ours(): return flash_cute.forward(q,k,v,True)
def sdpa(): return torch.nn.functional.scaled_dot_product_attention(q,k,v,is_causal=True),
def step(f):
    def run(): return torch.autograd.grad(f()[0],(q,k,v),dout)
    return run
x=torch.randn(4,requires_grad=True); dx=torch.ones(4)
fs={"ours fwd":ours,"lean fwd":lean,"lean2 fwd":lean2,"Function.apply fwd":full,"ours step":step(ours),"lean step":step(lean),"lean2 step":step(lean2),"full step":step(full),"mul step":lambda: torch.autograd.grad(x*2,x,dx), "fakes":lambda:(fake_f(),fake_b())}
res={n:[] for n in fs}
for r in range(80):
    for n,f in fs.items():
        t=time.perf_counter()
        for _ in range(200): f()
        res[n].append((time.perf_counter()-t)*5e3)
for n,v_ in res.items(): print(f"{n:20s} {st.median(v_):.2f} us  min {min(v_):.2f}")
