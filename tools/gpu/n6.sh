export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
LIBS="p6 al" timeout 100 python build/gpu/fw.py 2>&1 | grep -v Warn | tail -24
for l in t1 t2 t3; do timeout 100 python build/gpu/chk.py $l 128,256 2>&1 | tail -2 & done; wait
LIBS="p6" DET="p6 t1 t2 t3" DIMS=256,128 SEQ=512,2048,16384 SECS=0.12 timeout 170 python - <<'P' 2>&1 | grep -v Warn
import os,sys
s=open("build/gpu/bw.py").read().replace("""    for n in {n.split("@")[0] for n in libs}""","""    for n in ("t1","t2","t3"): torch.ops.load_library(f"build/gpu/bwlibs/{n}.so")
    for n in {n.split("@")[0] for n in libs}""").replace("            for n in libs:\n","            for n in ('t1','t2','t3'): f[n+'-det']=(lambda op: lambda: op(do, None, q, k, v, out, lse, causal, deterministic=True))(getattr(torch.ops, f'flash_cute_{n}')._backward.default)\n            for n in libs:\n").replace("os.environ.get('DET', '').split()","['p6']")
sys.argv.append("time"); exec(compile(s,"bw","exec"))
P
