import os, sys, statistics, torch
sys.path.insert(0, os.getcwd())
from benchmarks import timing
torch.manual_seed(0); dev = torch.device("cuda")
libs = os.environ["LIBS"].split()
for n in libs: torch.ops.load_library(f"build/gpu/bwlibs/{n}.so")
def lens(kind):
    g = torch.Generator().manual_seed(1)
    if kind == "equal512": return [512] * 32
    if kind == "equal128": return [128] * 128
    if kind == "equal2048": return [2048] * 8
    if kind == "uniform": return [int(x) for x in torch.randint(1, 4097, (8,), generator=g)]
    if kind == "outlier": return [32768] + [256] * 64
for d in (64, 128):
    h = 2048 // d
    for kind in ("equal128", "equal512", "equal2048", "uniform", "outlier"):
        for causal in (False, True):
            l = lens(kind); cu = torch.tensor([0] + list(torch.tensor(l).cumsum(0)), dtype=torch.int32, device=dev); t = sum(l)
            q, k, v = (torch.randn(t, h, d, device=dev, dtype=torch.bfloat16) for _ in range(3))
            f = {}; res = {}
            for n in libs:
                op = getattr(torch.ops, f"flash_cute_{n}")._forward_varlen
                f[n] = (lambda op: lambda: op(q, k, v, cu, cu, causal))(op)
            if kind.startswith("equal"):
                s = l[0]; dq, dk, dv = (x.view(len(l), s, h, d).transpose(1, 2) for x in (q, k, v))
                op = getattr(torch.ops, f"flash_cute_{libs[0]}")._forward
                f["dense"] = lambda: op(dq, dk, dv, causal)
            want = f[libs[0]]()[0]
            for n in libs[1:]:
                assert torch.equal(f[n]()[0], want) or (print("differs", n, kind), 1)
            got = timing.burst(f, dev, 0.15); u = {n: statistics.median(x) for n, x in got.items()}
            print(f"d{d} {kind} {'causal' if causal else 'full'} " + "  ".join(f"{n} {x:.1f}us ({u[libs[0]] / x:.3f})" for n, x in u.items()), flush=True)
