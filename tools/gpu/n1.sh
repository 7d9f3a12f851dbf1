# First call of the next session: are the kernels right, and what is each step worth?
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
for l in p3 r2 r7; do timeout 100 python build/gpu/chk.py $l 64,128,256 2>&1 | tail -8 & done; wait
timeout 60 compute-sanitizer --tool memcheck python build/gpu/chk.py r7 64 2>&1 | tail -4
LIBS="m0 p2 p3 r2 r4 r6 r7" DET="m0 r7" DIMS=64,128 SEQ=512,1024,2048,16384 SECS=0.15 timeout 170 python build/gpu/bw.py time 2>&1 | grep -v Warn
LIBS="m0 p3 r7" DET="m0 r7" DIMS=256 SEQ=512,2048,16384 SECS=0.15 timeout 60 python build/gpu/bw.py time 2>&1 | grep -v Warn
for a in "tl128.so 128 512 0" "tl.so 64 512 0"; do timeout 30 python build/gpu/tl.py $a 2>&1 | tail -9; done
