import sys, os
sys.path.insert(0, "build/gpu/sm"); sys.argv = ["f.py", "/tmp/smlibs"]
src = open("build/gpu/sm/f.py").read().split("MULTI =")[0]
exec(src)
from torch.profiler import profile, ProfilerActivity
for el, cols in (("fp32", 1024), ("bf16", 8192)):
    size = DT[el].itemsize; rows = 2**28 // size // cols
    x = torch.randn(rows, cols, device=dev).to(DT[el])
    outs = [torch.empty_like(x) for _ in range(4)]
    fs = {"copy0": partial(outs[0].copy_, x), "copy1": partial(outs[1].copy_, x), "torch": partial(torch.softmax, x, -1), "today": partial(flash_cute.softmax, x), "op": partial(torch.ops.flash_cute._softmax.default, x, 1.0, False, None, None)}
    for i in range(4): fs[f"base{i}"] = call(f"{el}_base", False, x, outs[i])[0]
    fs["triton"] = triton_softmax.softmax(x)
    import triton
    k = triton_softmax.whole_row; block = triton.next_power_of_2(cols); warps = 4 if block < 2048 else 8 if block < 8192 else 16
    for i in (0, 1): fs[f"triton{i}"] = partial(k[(rows,)], x, outs[i], cols, BLOCK=block, num_warps=warps)
    def fresh():
        o = torch.empty_like(x); l = torch.empty(rows, device=dev)
        return call(f"{el}_base", False, x, o)[0]()
    fs["fresh"] = fresh
    t = timeit(fs, 0.5)
    print(el, cols, "burst", {k: round(v, 1) for k, v in t.items()}, flush=True)
    for n, f in fs.items():
        f(); torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(20): f()
            torch.cuda.synchronize()
        ev = sorted((e for e in p.events() if e.time_range.elapsed_us() > 20), key=lambda e: e.time_range.start)
        d = sorted(e.time_range.elapsed_us() for e in ev); gaps = [b.time_range.start - a.time_range.end for a, b in zip(ev, ev[1:])]
        print("  ", n, len(ev), "kernel median", d[len(d) // 2], "gap median", sorted(gaps)[len(gaps) // 2], flush=True)
