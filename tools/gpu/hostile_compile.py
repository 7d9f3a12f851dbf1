import torch, flash_cute as F, math
import torch._dynamo.testing
torch.manual_seed(0); n=bad=0
def case(name):
    def w(f):
        global n,bad; n+=1
        torch._dynamo.reset()
        try: f()
        except Exception as e:
            bad+=1; print("##",name,type(e).__name__,str(e)[:400].replace("\n"," | "),flush=True)
    return w
mk=lambda *s,dt=torch.bfloat16,g=False: torch.randn(*s,dtype=dt).requires_grad_(g)
cnt=torch._dynamo.testing.CompileCounterWithBackend
@case("dynamic varlen recompiles")
def _():
    c=cnt("aot_eager"); f=torch.compile(lambda q,cu: F.forward_varlen(q,q,q,cu,causal=True),backend=c,fullgraph=True,dynamic=True)
    for ls in ([3,4],[1,2,9],[5],[2,2,2,2]):
        cu=torch.tensor([0]+ls).cumsum(0).int(); q=mk(sum(ls),2,32,g=True); o,l=f(q,cu); (o.sum()+l.sum()).backward(); o2,l2=F.forward_varlen(q,q,q,cu,causal=True); assert torch.equal(o,o2)
    assert c.frame_count<=2,c.frame_count
@case("dynamic dense auto")
def _():
    c=cnt("aot_eager"); f=torch.compile(lambda q,k: F.forward(q,k,k,True,window=(5,None)),backend=c,fullgraph=True)
    for s in (7,9,30,31,50): 
        q=mk(2,4,s,32,g=True);k=mk(2,2,s+3,32,g=True); o,l=f(q,k); (o.sum()+l.sum()).backward(); assert torch.equal(o,F.attention(q,k,k,True,window=(5,None)))
    assert c.frame_count<=2,c.frame_count
@case("inductor step")
def _():
    m=torch.nn.Linear(32,32).bfloat16(); f=torch.compile(lambda x:F.attention(*(m(x).view(1,-1,2,16).transpose(1,2) for _ in range(3)),causal=True).float().square().mean(),fullgraph=True)
    x=mk(1,10,32); a=f(x); a.backward(); g=m.weight.grad.clone(); m.weight.grad=None; F.attention(*(m(x).view(1,-1,2,16).transpose(1,2) for _ in range(3)),causal=True).float().square().mean().backward(); assert (g-m.weight.grad).abs().max()<1e-2
@case("export")
def _():
    class M(torch.nn.Module):
        def forward(self,q,k,u): return F.forward(q,k,k,True,seqused_k=u)
    d=torch.export.Dim("s",min=2,max=512); e=torch.export.Dim("t",min=2,max=512); b=torch.export.Dim("b",min=2,max=64)
    for strict in (True,False):
        ep=torch.export.export(M(),(mk(2,2,8,32),mk(2,2,9,32),torch.tensor([3,9],dtype=torch.int32)),dynamic_shapes=({0:b,2:d},{0:b,2:e},{0:b}),strict=strict)
        q,k,u=mk(3,2,20,32),mk(3,2,40,32),torch.tensor([3,9,40],dtype=torch.int32); assert torch.equal(ep.module()(q,k,u)[0],F.attention(q,k,k,True,seqused_k=u))
        ep.run_decompositions()
@case("export nested/compiled nested")
def _():
    x=torch.nested.nested_tensor([mk(3,2,16),mk(5,2,16)],layout=torch.jagged).requires_grad_()
    o=torch.compile(lambda x:F.attention(*(x.transpose(1,2),)*3,causal=True),fullgraph=True,backend="aot_eager")(x); o.values().sum().backward()
@case("fake cuda")
def _():
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode(allow_non_fake_inputs=True):
        for mkq in (lambda: torch.empty(2,9,4,64,device="cuda",dtype=torch.bfloat16).transpose(1,2), lambda: torch.empty(2,4,9,64,device="cuda",dtype=torch.float16)):
            q=mkq().requires_grad_(); o,l=F.forward(q,q,q,True); assert o.device.type=="cuda" and o.stride()==torch.empty_like(q).stride() and l.dtype==torch.float32 and l.shape==(2,4,9)
            (o.sum()+l.sum()).backward(); assert q.grad.shape==q.shape
        for bad_call in (lambda: F.forward(torch.empty(1,1,1,300,device="cuda",dtype=torch.half),*(torch.empty(1,1,1,300,device="cuda",dtype=torch.half),)*2), lambda: F.forward(torch.empty(1,3,1,64,device="cuda",dtype=torch.half),*(torch.empty(1,2,1,64,device="cuda",dtype=torch.half),)*2)):
            try: bad_call(); print("   accepted!")
            except ValueError as e: print("   ",e)
@case("same sentence traced")
def _():
    for a,kw in (((mk(1,2,3,8),mk(1,3,4,8),mk(1,3,4,8)),{}),((mk(1,2,3,8),mk(1,2,4,8),mk(1,2,5,8)),{}),((mk(1,2,3,8),mk(1,2,4,8),mk(1,2,4,8)),dict(seqused_k=torch.tensor([1]))),((mk(1,2,3,8),mk(1,2,4,8),mk(1,2,4,8)),dict(seqused_k=torch.tensor([1,2],dtype=torch.int32))),((mk(1,2,3,8),)*3,dict(softmax_scale=-1.)),((mk(1,2,3,8),)*3,dict(window=-4)),((mk(1,2,3,8),)*3,dict(family="sm70"))):
        m=[]
        for f in (F.forward,torch.compile(F.forward,backend="eager",fullgraph=True)):
            torch._dynamo.reset()
            try: f(*a,**kw); m.append("accepted")
            except Exception as e: m.append(str(e))
        k=m[0]
        if k not in m[1]: print("   differ:",m[0][:150],"||",m[1][:200].replace("\n"," "))
@case("opcheck")
def _():
    q=mk(1,2,5,16,g=True)
    for op,args in ((torch.ops.flash_cute.forward.default,(q,q,q,True)),(torch.ops.flash_cute.forward_varlen.default,(mk(7,2,16,g=True),)*3+(torch.tensor([0,3,7],dtype=torch.int32),))):
        r=torch.library.opcheck(op,args); 
@case("make_fx & functionalize")
def _():
    from torch.fx.experimental.proxy_tensor import make_fx
    q=mk(1,2,5,16); g=make_fx(torch.func.functionalize(lambda q:F.attention(q,q,q,True)))(q); assert torch.equal(g(q),F.attention(q,q,q,True))
    g=make_fx(torch.func.grad(lambda q:F.attention(q,q,q,True).float().sum()),tracing_mode="symbolic")(q); g(q)
@case("compile vmap/grad")
def _():
    q=mk(3,2,2,5,16)
    f=lambda q: torch.vmap(torch.func.grad(lambda q:F.attention(q,q,q,True).float().sum()))(q)
    a=torch.compile(f,backend="aot_eager",fullgraph=True)(q); assert (a-f(q)).abs().max()<1e-2
@case("deterministic flag")
def _():
    q=mk(1,2,50,16,g=True); torch.use_deterministic_algorithms(True)
    try:
        a=torch.autograd.grad(F.attention(q,q,q).sum(),q)[0]; b=torch.autograd.grad(torch.compile(F.attention,backend="aot_eager")(q,q,q).sum(),q)[0]; assert torch.equal(a,b)
    finally: torch.use_deterministic_algorithms(False)
@case("double backward refuses, also compiled")
def _():
    q=mk(1,2,5,16,g=True); g=torch.autograd.grad(F.attention(q,q,q).sum(),q,create_graph=True)[0]
    try: g.sum().backward(); print("   accepted")
    except NotImplementedError as e: print("   ",e)
@case("mutated graph input + reduce-overhead")
def _():
    @torch.compile(fullgraph=True)
    def f(x,q): x.add_(1); o=F.attention(q*x,q,q); return o,x
    x=torch.ones(()).bfloat16(); q=mk(1,2,5,16); o,_=f(x,q); assert torch.allclose(o.float(),F.attention(q*2,q,q).float(),atol=1e-2)
@case("error then good compiled")
def _():
    f=torch.compile(F.attention,backend="aot_eager"); q=mk(1,2,5,16)
    try: f(q,q,q[...,:8])
    except Exception as e: pass
    assert torch.equal(f(q,q,q),F.attention(q,q,q))
@case("jit trace / fx symbolic / deepcopy / pickle")
def _():
    q=mk(1,2,5,16); t=torch.jit.trace(lambda q:F.attention(q,q,q,True),q,check_trace=False); assert torch.equal(t(mk(1,2,9,16)).new_zeros(1),torch.zeros(1,dtype=torch.bfloat16))
    import pickle; pickle.loads(pickle.dumps(F.forward)); pickle.loads(pickle.dumps(F.explain(q,q,q)))
@case("CHECK env")
def _():
    pass
print(n,"cases",bad,"bad")
