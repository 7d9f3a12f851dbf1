import os, sys, torch
sys.path.insert(0, os.getcwd())
import flash_cute
from flash_cute import reference
torch.manual_seed(0)
lib = sys.argv[1]; dims = [int(x) for x in sys.argv[2].split(",")]
torch.ops.load_library(f"build/gpu/bwlibs/{lib}.so")
op = getattr(torch.ops, f"flash_cute_{lib}")
dev = "cuda"; dt = torch.bfloat16; bad = 0; n = 0
for d in dims:
    for (b, hq, hk, sq, sk, causal, window) in [(1,1,1,64,128,False,None),(2,4,2,200,300,False,None),(2,4,2,300,200,True,None),(2,4,1,333,333,False,(50,20)),(1,2,2,515,1000,True,None),(1,2,2,1000,515,False,(100,None)),(3,40,8,700,700,True,None),(1,1,1,1,1,True,None),(40,32,16,130,200,True,None),(30,16,8,520,300,False,None),(24,16,16,1500,77,False,None),(60,16,16,200,130,True,None)]:
        for det in (False, True):
            q = torch.randn(b, sq, hq, d, device=dev, dtype=dt).transpose(1, 2)
            k, v = (torch.randn(b, sk, hk, d, device=dev, dtype=dt).transpose(1, 2) for _ in "kv")
            out, lse = flash_cute.forward(q, k, v, causal, window=window, family="sm80")
            do = torch.randn_like(out); dl = torch.randn_like(lse)
            dl = torch.where(torch.isinf(lse), 0, dl)
            w = (None, None) if window is None else window
            got = op._backward(do, dl, q, k, v, out, lse, causal, window_left=w[0], window_right=w[1], deterministic=det)
            ref = reference.backward(q, k, v, do, dl, causal, window=window)
            yard = reference.backward(q, k, v, do, dl, causal, window=window, dtype=dt)
            for name, g, r, y in zip(("dq", "dk", "dv"), got, ref, yard):
                e, a = (g.double() - r).abs(), (y.double() - r).abs(); n += 1
                if not (e.max() <= 2 * a.max() + 1e-5 and e.square().mean().sqrt() <= 2 * a.square().mean().sqrt() + 1e-5):
                    bad += 1; print("FAIL", lib, d, (b, hq, hk, sq, sk, causal, window), det, name, e.max().item(), a.max().item())
print(lib, dims, n, "checked", bad, "bad", flush=True)
