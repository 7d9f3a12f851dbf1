import os, sys, torch
sys.path.insert(0, os.getcwd())
import flash_cute
n, d, s, causal = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "causal"
if n != "base": torch.ops.load_library(f"build/gpu/bwlibs/{n}.so")
op = torch.ops.flash_cute if n == "base" else getattr(torch.ops, f"flash_cute_{n}")
b, h = 16384 // s, 2048 // d
q, k, v, do = (torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
out, lse = flash_cute.forward(q, k, v, causal)
for _ in range(3): op._backward(do, None, q, k, v, out, lse, causal)
torch.cuda.synchronize()
