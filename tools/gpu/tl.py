"""Where a thread block's time goes: python build/gpu/tl.py tl128.so 128 512 0 -> mean clocks between marks, and all marks as JSON under $OUT"""
import ctypes, collections, json, os, sys, torch
lib, d, s, causal = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), bool(int(sys.argv[4]))
path = os.path.abspath(f"build/gpu/bwlibs/{lib}")
torch.ops.load_library(path); c = ctypes.CDLL(path); op = torch.ops.flash_cute_tl
b, h = 16384 // s, 2048 // d
q, k, v, do = (torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
out, lse = op._forward(q, k, v, causal)
counts, marks = (ctypes.c_int * 6)(), (ctypes.c_int * (6 * 2048 * 2))()
for i in range(3):
    op._backward(do, None, q, k, v, out, lse, causal)
    err = c.flash_cute_marks(counts, marks)
print("err", err, list(counts))
roles = [[(marks[(r * 2048 + i) * 2], marks[(r * 2048 + i) * 2 + 1]) for i in range(2048) if marks[(r * 2048 + i) * 2] != 0] for r in range(6)]
for r, m in enumerate(roles):
    t = collections.defaultdict(list)
    for (a, x), (e, y) in zip(m, m[1:]): t[a, e].append((y - x) % 2**32)
    print("role", r, {f"{a}>{e}": (round(sum(x) / len(x)), len(x)) for (a, e), x in sorted(t.items())})
w = [x for e, x in roles[0] if e == 1]
print("tile period", [(y - x) % 2**32 for x, y in zip(w, w[1:])][:40])
if os.environ.get("OUT"): json.dump(roles, open(f"{os.environ['OUT']}/tl_{d}_{s}_{int(causal)}.json", "w"))
