"""Chains of softmax, attention and torch's kernels, back to back, whose buffers are used again at once."""
import os, random, sys, threading, time
sys.path.insert(0, os.getcwd())
import torch, flash_cute
if os.environ.get("RACY"):
    torch.ops.load_library("build/gpu/bwlibs/r1.so"); R1 = torch.ops.flash_cute_r1._softmax.default
    flash_cute.softmax = lambda x, scale=1.0: R1(x, scale, False, None, None)
dev = torch.device("cuda"); seed = int(sys.argv[1]); secs = float(sys.argv[2]); end = time.time() + secs
rnd = random.Random(seed); torch.manual_seed(seed); count = 0; bad = 0
tol = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}
def close(a, b, t, what):
    global count, bad
    count += 1
    e = (a.double() - b.double()).abs().max().item() if a.numel() else 0
    if not e <= t: bad += 1; print("BAD", what, e, flush=True)
def chain(r, steps=40):
    dt = r.choice(list(tol)); cols = r.choice([1, 7, 31, 128, 511, 512, 1000, 2048, 4099, 8192, 50257, 131072]); rows = max(1, r.choice([1, 3, 132, 1000, 40000]) * 512 // cols)
    x0 = torch.randn(rows, cols, device=dev, dtype=torch.float32).to(dt); kept = []
    x = x0.clone()
    for i in range(steps):
        x.mul_(1.25 if i % 2 else 0.8)           # torch's kernel before, in place
        y, lse = flash_cute.softmax(x)           # early behind it
        x.copy_(x0 if r.random() < .5 else y)    # over what it read
        z, _ = flash_cute.softmax(y, scale=3.0)  # early behind torch's, reads what ours wrote
        w, _ = flash_cute.softmax(z)             # early behind ours
        if i % 8 == r.randrange(8): kept.append((x.clone() * 0, y.clone(), z, w))
        else: del z, w
        if r.random() < .1 and dt != torch.float32:
            q = torch.randn(2, 4, 100, 64, device=dev, dtype=dt); o, l = flash_cute.forward(q, q, q, True); flash_cute.softmax(o)
    for _, y, z, w in kept:
        close(z, torch.softmax(3.0 * y.float(), -1).to(dt), tol[dt], (dt, rows, cols, "z"))
        close(w, torch.softmax(z.float(), -1).to(dt), tol[dt], (dt, rows, cols, "w"))
def grads(r):
    dt = r.choice(list(tol)); cols = r.choice([32, 511, 1024, 8192, 65536]); rows = max(1, 65536 * r.choice([1, 8]) // cols)
    x = torch.randn(rows, cols, device=dev).to(dt).requires_grad_(); g = torch.randn(rows, cols, device=dev).to(dt)
    for _ in range(5):
        p, _ = flash_cute.softmax(x); (a,) = torch.autograd.grad(p, x, g)
        xr = x.detach().double().requires_grad_(); (b,) = torch.autograd.grad(torch.softmax(xr, -1), xr, g.double())
        close(a, b.to(dt), tol[dt] * 4, (dt, rows, cols, "grad"))
def graph(r):
    dt = r.choice(list(tol)); cols = r.choice([64, 512, 1024, 8192, 32768]); x = torch.randn(2**18 // cols, cols, device=dev).to(dt)
    flash_cute.softmax(x); torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        y = flash_cute.softmax(x)[0]; z = flash_cute.softmax(y, scale=5.0)[0]; x2 = z + x; w = flash_cute.softmax(x2)[0]
    for _ in range(6):
        x.normal_(); g.replay(); g.replay()
        ry = torch.softmax(x.float(), -1).to(dt); rz = torch.softmax(5 * y.float(), -1).to(dt)
        close(y, ry, tol[dt], (dt, cols, "graph y")); close(z, rz, tol[dt], (dt, cols, "graph z")); close(w, torch.softmax(x2.float(), -1).to(dt), tol[dt], (dt, cols, "graph w"))
def work(s):
    r = random.Random(s)
    with torch.cuda.stream(torch.cuda.Stream()):
        while time.time() < end:
            (chain if os.environ.get("RACY") else r.choice([chain, chain, grads]))(r)
ts = [threading.Thread(target=work, args=(seed * 10 + i,)) for i in range(3)]
[t.start() for t in ts]; [t.join() for t in ts]
end2 = time.time() + 8
while time.time() < end2: graph(rnd)
torch.cuda.synchronize()
print(f"smstress: {count} checks, {bad} failures", flush=True)
sys.exit(bad > 0)
