import os, statistics, sys, torch
sys.path.insert(0, os.getcwd())
import flash_cute
from flash_cute import reference
from benchmarks import timing
dev = torch.device("cuda")
torch.manual_seed(0)
def check(b, hq, hk, sq, sk, d, causal, window=None, det=False, dlse=True, dt=torch.bfloat16):
    q = torch.randn(b, sq, hq, d, device=dev, dtype=dt).transpose(1, 2)
    k = torch.randn(b, sk, hk, d, device=dev, dtype=dt).transpose(1, 2)
    v = torch.randn(b, sk, hk, d, device=dev, dtype=dt).transpose(1, 2)
    out, lse = flash_cute.forward(q, k, v, causal, window=window)
    do = torch.randn_like(out); dl = torch.randn_like(lse) if dlse else None
    w = (None, None) if window is None else window
    got = NS._backward(do, dl, q, k, v, out, lse, causal, window_left=w[0], window_right=w[1], deterministic=det)
    ref = reference.backward(q, k, v, do, dl, causal, window=window)
    yard = reference.backward(q, k, v, do, dl, causal, window=window, dtype=dt)
    s = f"{b,hq,hk,sq,sk,d} causal={causal} w={window} det={det}: "
    ok = True
    for n, g, r, y in zip(("dq", "dk", "dv"), got, ref, yard):
        e, a = (g.double() - r).abs(), (y.double() - r).abs()
        m, rms = e.max().item() / (2 * a.max().item() + 1e-5), e.square().mean().sqrt().item() / (2 * a.square().mean().sqrt().item() + 1e-5)
        ok &= m <= 1 and rms <= 1
        s += f"{n} {m:.2f} {rms:.2f}  "
    print(("ok   " if ok else "FAIL ") + s, flush=True)
NS = torch.ops.flash_cute
if os.environ.get('NS'):
    torch.ops.load_library(f"build/gpu/bwlibs/{os.environ['NS']}.so"); NS = getattr(torch.ops, 'flash_cute_' + os.environ['NS'])
dims = [int(x) for x in os.environ.get("DIMS", "64,128").split(",")]
if "check" in sys.argv:
    for d in dims:
        for det in (False, True):
            check(1, 1, 1, 64, 128, d, False, det=det)
            check(2, 4, 2, 200, 300, d, False, det=det)
            check(2, 4, 2, 300, 200, d, True, det=det)
            check(2, 4, 1, 333, 333, d, False, window=(50, 20), det=det)
            check(1, 2, 2, 515, 1000, d - 8, True, det=det)
            check(1, 2, 2, 1000, 515, d, False, window=(100, None), det=det)
if "time" in sys.argv:
    cells = [(c, s) for c in (False, True) for s in [int(x) for x in os.environ.get("SEQ", "512,2048,16384").split(",")]]
    libs = os.environ.get("LIBS", "").split()
    for n in {n.split("@")[0] for n in libs}: torch.ops.load_library(f"build/gpu/bwlibs/{n}.so")
    for d in dims:
        for causal, s in cells:
            b, h = 16384 // s, 2048 // d
            q, k, v, do = (torch.randn(b, s, h, d, device=dev, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
            try: out, lse = flash_cute.forward(q, k, v, causal, family="sm80")
            except Exception: out, lse = getattr(torch.ops, f"flash_cute_{libs[0].split(chr(64))[0]}")._forward(q, k, v, causal)
            fo, fl, cq, ck, mq, mk, rs, un, _ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
            f = {"fa2": lambda: torch.ops.aten._scaled_dot_product_flash_attention_backward(do, q, k, v, fo, fl, cq, ck, mq, mk, 0.0, causal, rs, un),
                 "ours": lambda: torch.ops.flash_cute._backward.default(do, None, q, k, v, out, lse, causal),
                 "det": lambda: torch.ops.flash_cute._backward.default(do, None, q, k, v, out, lse, causal, deterministic=True)}
            for n in libs:
                base, _, x = n.partition("@"); op = getattr(torch.ops, f"flash_cute_{base}")._backward.default
                def call(op=op, x=x):
                    if x: os.environ["FC_F"] = x
                    return op(do, None, q, k, v, out, lse, causal)
                f[n] = call
                if n in os.environ.get('DET', '').split(): f[n + '-det'] = (lambda op: lambda: op(do, None, q, k, v, out, lse, causal, deterministic=True))(op)
            want = f["fa2"]()
            for n in list(f):
                try: g = f[n]()
                except Exception as e: print(n, str(e)[:150]); del f[n]; continue
                bad = max(((a.float() - b.float()).abs().max() / b.float().abs().max()).item() for a, b in zip(g, want))
                if not bad <= 0.02: print(f"!! {n} differs {bad}")
            got = timing.burst(f, dev, float(os.environ.get("SECS", "0.5")))
            fl = 10 * b * h * s * s * d * (0.5 if causal else 1)
            t = {n: statistics.median(x) for n, x in got.items()}
            print(f"d{d} {'causal' if causal else 'full'} {s}: " + "  ".join(f"{n} {fl / us / 1e6:.0f} ({t['fa2'] / us:.3f})" for n, us in t.items()), flush=True)
