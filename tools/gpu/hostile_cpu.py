import torch, flash_cute, math, traceback, threading, copy, os, sys, warnings
torch.manual_seed(0)
F=flash_cute
def ref(q,k,v,causal=False,window=None,scale=None,uq=None,uk=None,lp=None):
    q,k,v=(x.double() for x in (q,k,v)); B,H,Sq,D=q.shape; Hk=k.shape[1]; Sk=k.shape[2]
    k=k.repeat_interleave(H//Hk,1); v=v.repeat_interleave(H//Hk,1)
    sc=(scale if scale is not None else 1/math.sqrt(D))*(q@k.transpose(-1,-2))
    i=torch.arange(Sq)[:,None]; j=torch.arange(Sk)[None]
    m=torch.zeros(B,1,Sq,Sk,dtype=torch.bool)
    L,R=(None,None) if window is None else (window if isinstance(window,tuple) else (window,window))
    if causal: R=0
    for b in range(B):
        nq=Sq if uq is None else int(uq[b]); e=Sk if uk is None else int(uk[b]); s=0 if lp is None else int(lp[b])
        nk=max(0,e-s); jj=j-s; off=nk-nq
        ok=(i<nq)&(jj>=0)&(jj<nk)
        if L is not None: ok&=jj>=i+off-L
        if R is not None: ok&=jj<=i+off+R
        m[b,0]=ok
    sc=sc.masked_fill(~m,-math.inf)
    lse=torch.logsumexp(sc,-1); p=torch.exp(sc-lse.masked_fill(lse==-math.inf,0)[...,None]).masked_fill(~m,0)
    return p@v,lse
def close(a,b,t=2e-2): 
    a=a.double(); f=torch.isfinite(b)
    assert (torch.isfinite(a)==f).all(), "finiteness"
    assert torch.equal(a[~f&~b.isnan()],b[~f&~b.isnan()].to(a))
    e=(a[f]-b[f]).abs().max().item() if f.any() else 0
    assert e<t*max(1,b[f].abs().max().item() if f.any() else 1),e
n=0; bad=0
def case(name):
    def w(f):
        global n,bad; n+=1
        try: f()
        except Exception as e:
            bad+=1; print("##",name,type(e).__name__,str(e)[:300].replace("\n"," | "))
    return w
mk=lambda *s,dt=torch.bfloat16,g=False: torch.randn(*s,dtype=dt).requires_grad_(g)
@case("fuzz dense")
def _():
    import random; r=random.Random(1)
    for t in range(60):
        B=r.choice([1,2,3]);Hk=r.choice([1,2,3]);G=r.choice([1,3,7]);Sq=r.choice([1,2,17,65]);Sk=r.choice([1,3,33,100]);D=r.choice([1,3,8,40,64,97,200,256])
        q=mk(B,Hk*G,Sq,D,g=True);k=mk(B,Hk,Sk,D,g=True);v=mk(B,Hk,Sk,D,g=True)
        c=r.random()<.5; w=r.choice([None,0,5,(3,None),(None,4),(1000,0)])
        kw={}
        if r.random()<.5: kw["seqused_q"]=torch.tensor([r.randint(0,Sq) for _ in range(B)],dtype=torch.int32)
        if r.random()<.5: kw["seqused_k"]=torch.tensor([r.randint(0,Sk) for _ in range(B)],dtype=torch.int32)
        if r.random()<.3 and "seqused_k" in kw: kw["leftpad_k"]=torch.tensor([r.randint(0,int(x)) for x in kw["seqused_k"]],dtype=torch.int32)
        o,l=F.forward(q,k,v,c,window=w,**kw)
        rq,rk,rv=(x.detach().double().requires_grad_() for x in (q,k,v))
        ro,rl=ref(rq,rk,rv,c,w,None,kw.get("seqused_q"),kw.get("seqused_k"),kw.get("leftpad_k"))
        close(o.detach(),ro.detach()); close(l.detach(),rl.detach(),1e-2)
        do=torch.randn_like(o); dl=torch.randn_like(l)
        g=torch.autograd.grad((o,l),(q,k,v),(do,dl))
        fin=torch.isfinite(rl)
        R=torch.autograd.grad((ro*do.double()).sum()+(rl[fin]*dl.double()[fin]).sum(),(rq,rk,rv))
        for a,b in zip(g,R): close(a,torch.nan_to_num(b),3e-2)
def _off(f): pass
@_off
def _():
    q=mk(1,2,5,64); F.forward(q,q,q)
    pid=os.fork()
    if pid==0:
        try: F.forward(q,q,q); os._exit(0)
        except BaseException: os._exit(1)
    assert os.waitpid(pid,0)[1]==0
@case("threads")
def _():
    q=mk(1,2,50,64,g=True); errs=[]
    def f():
        try:
            for _ in range(20): o,l=F.forward(q,q,q,True); torch.autograd.grad(o.sum()+l.sum(),q)
        except Exception as e: errs.append(e)
    ts=[threading.Thread(target=f) for _ in range(8)]; [t.start() for t in ts]; [t.join() for t in ts]; assert not errs,errs
@case("jacrev of lse")
def _():
    q=mk(1,1,3,8); k=mk(1,1,4,8)
    J=torch.func.jacrev(lambda q: F.forward(q,k,k)[1])(q); assert J.shape==(1,1,3,1,1,3,8)
    rq=q.double(); JR=torch.func.jacrev(lambda q: ref(q,k,k)[1])(rq); close(J,JR,3e-2)
@case("hessian refuses")
def _():
    q=mk(1,1,3,8)
    for f in (torch.func.hessian(lambda q: F.attention(q,q,q).float().sum()), torch.func.jacfwd(lambda q: F.attention(q,q,q)), lambda q: torch.func.jvp(lambda q:F.attention(q,q,q),(q,),(q,)), lambda q: torch.func.linearize(lambda q:F.attention(q,q,q),q)[1](q)):
        try: f(q); raise AssertionError("accepted")
        except NotImplementedError as e: assert "flash_cute" in str(e), e
@case("vmap odd dims")
def _():
    q=mk(2,3,5,4,8); 
    for d in range(5):
        x=q.movedim(0,d)
        y=torch.vmap(lambda a: F.attention(a,a,a,True),in_dims=d,out_dims=d)(x).movedim(d,0)
        z=torch.stack([F.attention(a,a,a,True) for a in q]); assert torch.equal(y,z) or (y-z).abs().max()<1e-2
    y=torch.vmap(torch.vmap(lambda a,b: F.forward(a,b,b)[1],in_dims=(0,None)),in_dims=(None,0))(q[:,:1],q[:2,:1]); 
@case("vmap grad per sample")
def _():
    q=mk(4,1,2,6,16); w=mk(1,2,6,16)
    g=torch.vmap(torch.func.grad(lambda w,x:(F.forward(x*w,x,x,True)[0].float()**2).sum()),in_dims=(None,0))(w,q)
    for i in range(4): close(g[i],torch.func.grad(lambda w:(ref(q[i]*w,q[i],q[i],True)[0]**2).sum())(w.double()),5e-2)
@case("vmap lengths")
def _():
    q=mk(3,2,2,6,16); u=torch.tensor([[1,2],[0,6],[3,3]],dtype=torch.int32)
    y=torch.vmap(lambda q,u:F.attention(q,q,q,seqused_k=u))(q,u)
    for i in range(3): close(y[i],ref(q[i],q[i],q[i],uk=u[i])[0])
@case("checkpoint")
def _():
    from torch.utils.checkpoint import checkpoint
    for re in (True,False):
        q=mk(1,2,9,32,g=True); o=checkpoint(lambda q:F.attention(q,q,q,True),q,use_reentrant=re); o.sum().backward(); g=q.grad.clone(); q.grad=None
        F.attention(q,q,q,True).sum().backward(); assert torch.equal(g,q.grad)
@case("saved hooks")
def _():
    q=mk(1,2,9,32,g=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t:t.clone().numpy() if t.dtype!=torch.bfloat16 else t.float().numpy(),lambda a: torch.from_numpy(a) if False else torch.from_numpy(a)):
        try: F.forward(q.half().detach().requires_grad_(),q.half(),q.half())[0].sum().backward()
        except Exception as e: print("   hooks:",type(e).__name__,str(e)[:150])
@case("inplace modified")
def _():
    q=mk(1,2,9,32,g=True); k=q.detach().clone().requires_grad_(); kk=k*1; o=F.attention(q,kk,kk); 
    with torch.no_grad(): kk.add_(1)
    try: o.sum().backward(); raise AssertionError("accepted")
    except RuntimeError as e: assert "modified" in str(e)
@case("inference then grad")
def _():
    with torch.inference_mode(): q=mk(1,2,9,32); o,l=F.forward(q,q,q)
    assert o.is_inference()
    w=mk(1,2,9,32,g=True)
    try: F.forward(w,q,q)[0].sum().backward()
    except RuntimeError as e: print("   inf:",str(e)[:120])
@case("autocast")
def _():
    q=torch.randn(1,2,9,32,requires_grad=True)
    with torch.autocast("cpu",torch.bfloat16): o=F.attention(q,q,q)
    assert o.dtype==torch.bfloat16; o.sum().backward(); assert q.grad.dtype==torch.float32
    with torch.autocast("cpu",torch.float16): o=F.attention(q,q.half(),q.bfloat16()); assert o.dtype==torch.float16
@case("strides")
def _():
    b=mk(2,4,6,40)
    for x in (b.transpose(1,2).contiguous().transpose(1,2), b.flip(2), b[...,::2], b.expand(2,4,6,40), b[:1].expand(3,4,6,40), b.as_strided((2,2,5,16),(8,3,2,1)), b[:,:,::2], b.permute(3,2,1,0)[:16].permute(3,2,1,0)):
        x=x.detach().requires_grad_(); o,l=F.forward(x,x,x,True); close(o.detach(),ref(x.detach(),x.detach(),x.detach(),True)[0]); assert o.stride()==torch.empty_like(x).stride(),(o.stride(),x.stride())
        torch.autograd.grad(o.sum(),x)
    o,l=F.forward(b,b,b); 
@case("zero sizes")
def _():
    for s in ((0,2,3,8),(2,0,3,8),(2,2,0,8),(2,2,3,8)):
        for sk in ((s[0],s[1],0,8),(s[0],s[1],5,8)):
            q=mk(*s,g=True);k=mk(*sk,g=True); o,l=F.forward(q,k,k,True); assert o.shape==s and l.shape==s[:3]
            (o.sum()+l[torch.isfinite(l)].sum()).backward(); assert q.grad.shape==s and not q.grad.isnan().any()
    try: F.forward(mk(1,1,1,0),mk(1,1,1,0),mk(1,1,1,0)); print("   head_dim 0 accepted")
    except ValueError as e: print("  ",e)
@case("inf scores / nan")
def _():
    q=torch.full((1,1,2,8),math.inf,dtype=torch.float16); k=mk(1,1,3,8,dt=torch.float16)
    o,l=F.forward(q,k,k); r=ref(q,k,k); print("   inf q:",o.isnan().all().item(),l.flatten().tolist(), r[1].flatten().tolist())
    k2=k.clone(); k2[0,0,1]=math.nan; o,l=F.forward(k[:,:,:2],k2,k2,True); 
    v=k.clone(); v[0,0,2]=math.inf; o,l=F.forward(mk(1,1,3,8,dt=torch.float16),k,v,True); assert torch.isfinite(o[0,0,:2]).all(), "inf of an invisible value leaks"
@case("varlen fuzz")
def _():
    import random; r=random.Random(2)
    for t in range(40):
        B=r.randint(0,5); lq=[r.choice([0,1,5,33]) for _ in range(B)]; lk=[r.choice([0,1,4,50]) for _ in range(B)]
        pre=r.randint(0,3);post=r.randint(0,3)
        cq=torch.tensor([pre]+lq).cumsum(0).int(); ck=torch.tensor([pre]+lk).cumsum(0).int()
        Hk=r.choice([1,2]);G=r.choice([1,5]);D=r.choice([8,33,128]); c=r.random()<.5; w=r.choice([None,3,(2,None)])
        q=mk(int(cq[-1])+post,Hk*G,D,g=True);k=mk(int(ck[-1])+post,Hk,D,g=True);v=mk(int(ck[-1])+post,Hk,D,g=True)
        o,l=F.forward_varlen(q,k,v,cq,ck,c,window=w)
        do=torch.randn_like(o);dl=torch.randn_like(l); g=torch.autograd.grad((o,l),(q,k,v),(do,dl))
        O=torch.zeros_like(o,dtype=torch.double);Lr=torch.full(l.shape,-math.inf,dtype=torch.double); G_=[torch.zeros(x.shape,dtype=torch.double) for x in (q,k,v)]
        for b in range(B):
            a,e=int(cq[b]),int(cq[b+1]);a2,e2=int(ck[b]),int(ck[b+1])
            X=[x.detach()[s:t].double().requires_grad_() for x,s,t in ((q,a,e),(k,a2,e2),(v,a2,e2))]
            ro,rl=ref(*(x.transpose(0,1)[None] for x in X),c,w); O[a:e]=ro[0].transpose(0,1).detach();Lr[:,a:e]=rl[0].detach()
            fin=torch.isfinite(rl[0]); loss=(ro[0].transpose(0,1)*do[a:e].double()).sum()+(rl[0][fin]*dl[:,a:e].double()[fin]).sum()
            if loss.requires_grad:
                for G1,x,(s,t2) in zip(G_,torch.autograd.grad(loss,X,allow_unused=True),((a,e),(a2,e2),(a2,e2))):
                    if x is not None: G1[s:t2]=torch.nan_to_num(x)
        close(o.detach(),O);close(l.detach(),Lr,1e-2); [close(a,b,3e-2) for a,b in zip(g,G_)]
print(n,"cases",bad,"bad")
