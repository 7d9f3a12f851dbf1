import os, sys, torch
sys.path.insert(0, os.getcwd())
import flash_cute
lib, d, s, causal = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "c"
torch.ops.load_library(f"build/gpu/bwlibs/{lib}.so")
b, h = 16384 // s, 2048 // d
q, k, v, do = (torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
op = getattr(torch.ops, f"flash_cute_{lib}")
out, lse = op._forward(q, k, v, causal)
for _ in range(3): op._backward.default(do, None, q, k, v, out, lse, causal)
torch.cuda.synchronize()
