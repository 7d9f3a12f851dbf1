"""Sums of dQ that nobody clears: free, deterministic and sm80 gradients agree, over odd problems, streams at once."""
import random, sys, time, torch
import flash_cute
random.seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0); torch.manual_seed(0)
dev = "cuda"; end = time.time() + float(sys.argv[2] if len(sys.argv) > 2 else 25); n = bad = 0
B = torch.ops.flash_cute._backward
def poison():
    x = torch.full((1 << 28,), float("nan"), device=dev, dtype=torch.float32); del x
streams = [torch.cuda.Stream() for _ in range(3)]
def compare(tag, got, want, tol=0.03):
    global bad, n
    for name, g, w in zip(("dq", "dk", "dv"), got, want):
        n += 1
        g, w = g.float(), w.float()
        e = (g - w).abs().max().item() if g.numel() else 0.0
        m = w.abs().max().item() if g.numel() else 0.0
        if not e <= tol * m + 1e-3:
            bad += 1; print("FAIL", tag, name, e, m, flush=True)
while time.time() < end:
    d = random.choice([64, 96, 128, 192, 256, 40, 72]); dt = random.choice([torch.bfloat16, torch.float16])
    hk = random.choice([1, 2, 3, 5]); hq = hk * random.choice([1, 1, 2, 8])
    causal = random.random() < .5
    window = random.choice([None, None, (random.randint(0, 300), random.randint(0, 300))]) if not causal else None
    if random.random() < .45:
        b = random.randint(1, 40); sq = random.choice([1, 64, 127, 128, 200, 512, 700, 1500]); sk = random.choice([sq, sq, 1, 64, 300, 1000, 3000])
        shape = lambda h, s: torch.randn(b, s, h, d, device=dev, dtype=dt).transpose(1, 2)
        q, k, v = shape(hq, sq), shape(hk, sk), shape(hk, sk)
        args = dict(causal=causal, window=window); tag = ("dense", b, hq, hk, sq, sk, d, causal, window, dt)
        fwd = lambda fam, det: flash_cute.forward(*leaves, causal, window=window, family=fam, deterministic=det)
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    else:
        b = random.randint(1, 60); lens = lambda: [random.choice([0, 1, 30, 64, 128, 200, 512, random.randint(0, 2500)]) for _ in range(b)]
        lq = lens(); lk = lq if random.random() < .6 else lens()
        cu = lambda l: torch.tensor([0] + list(torch.tensor(l).cumsum(0)), dtype=torch.int32, device=dev)
        cq, ck = cu(lq), cu(lk); tq, tk = sum(lq), sum(lk)
        if tq == 0 or tk == 0: continue
        scrambled = random.random() < .1
        if scrambled: ck = ck[torch.randperm(b + 1, device=dev)].contiguous(); cq = cq[torch.randperm(b + 1, device=dev)].contiguous()
        q, k, v = (torch.randn(t, h, d, device=dev, dtype=dt) for t, h in ((tq, hq), (tk, hk), (tk, hk)))
        tag = ("packed", scrambled, b, hq, hk, lq[:9], lk[:9], d, causal, window, dt)
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        fwd = lambda fam, det: flash_cute.forward_varlen(*leaves, cq, ck, causal, window=window, family=fam, deterministic=det)
    out, lse = fwd("sm90", False); do = torch.randn_like(out)
    grads = lambda fam, det: torch.autograd.grad(fwd(fam, det)[0], leaves, do)
    poison()
    got = []
    for i, st in enumerate(streams):
        st.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(st): got.append(grads("sm90", i == 2))
    torch.cuda.synchronize()
    if tag[0] == "packed" and tag[1]: n += 3; continue   # only: it ends, and nothing is touched out of bounds
    want = grads("sm80", False)
    for i, g in enumerate(got): compare((i,) + tag, g, want)
    again = grads("sm90", True)
    if not all(torch.equal(a, b) for a, b in zip(again, got[2])): bad += 1; print("FAIL bits", tag, flush=True)
print("stress", n, "compared", bad, "bad", flush=True)
