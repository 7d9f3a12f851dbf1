import torch, time, flash_cute, statistics as st
print(flash_cute.__file__)
D=64; q=torch.randn(2,4,64,D,device="cuda",dtype=torch.bfloat16)
qp=torch.randn(128,4,D,device="cuda",dtype=torch.bfloat16); cu=torch.tensor([0,64,128],dtype=torch.int32,device="cuda"); used=torch.tensor([64,50],dtype=torch.int32,device="cuda")
fs={"dense":lambda: flash_cute.forward(q,q,q,True),"varlen":lambda: flash_cute.forward_varlen(qp,qp,qp,cu,causal=True),"varlen2":lambda: flash_cute.forward_varlen(qp,qp,qp,cu,cu,True),"padded":lambda: flash_cute.forward(q,q,q,True,seqused_q=used,seqused_k=used)}
res={k:[] for k in fs}
for r in range(60):
    for k,f in fs.items():
        torch.cuda.synchronize(); t=time.perf_counter()
        for _ in range(100): f()
        res[k].append((time.perf_counter()-t)*1e4); torch.cuda.synchronize()
m={k:st.median(v[10:]) for k,v in res.items()}
print({k:f"{v:.2f} us {v/m['dense']:.3f}" for k,v in m.items()})
