import os, sys, statistics as st, time
sys.path.insert(0, os.getcwd())
import torch, flash_cute
from dataclasses import replace
from benchmarks.overhead import *
dev=torch.device("cuda")
def go(tag, found, calls, secs=1.5):
    s={n:[] for n in found}
    end=time.time()+secs
    while time.time()<end:
        for n,f in found.items():
            with only_flash(): s[n].append(host_us(f, calls, dev))
    m={n:st.median(v[1:]) for n,v in s.items()}; a=list(m.values())
    print(tag, {n:round(v,1) for n,v in m.items()}, "ratio %.3f"%(a[0]/a[1]), "rounds", len(v:=s[list(s)[0]]), flush=True)
for p in TINY:
    *leaves, dout = replace(p, direction="both").inputs(dev)
    print([tuple(x.shape)+x.stride() for x in leaves], dout.stride())
    for l in leaves: l.requires_grad_()
    ours=lambda q,k,v: flash_cute.forward(q,k,v,p.causal)[0]
    theirs=lambda q,k,v: torch.nn.functional.scaled_dot_product_attention(q,k,v,is_causal=p.causal)
    step=lambda f: (lambda: torch.autograd.grad(f(*leaves), leaves, dout))
    found={"ours":step(ours),"sdpa":step(theirs)}
    with only_flash(): [f() for f in found.values()]
    go("400", found, 400); go("100", found, 100)
    with only_flash():
        c=torch.compile(ours,fullgraph=True,dynamic=False); step(c)()
    go("400 after compile", found, 400)
