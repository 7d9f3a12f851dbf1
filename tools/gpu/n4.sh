export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
for l in q1 q2; do timeout 100 python build/gpu/chk.py $l 64,128,256 2>&1 | tail -4 & done; wait
LIBS="p6 q1 q2" DET="" DIMS=64,128 SEQ=512,1024,2048 SECS=0.15 timeout 170 python build/gpu/bw.py time 2>&1 | grep -v Warn
LIBS="p6 q1 q2" SEQ=512 timeout 60 python build/gpu/prof2.py 2>&1 | grep -v Warn
for a in "tl128.so 128 512 0" "tl64.so 64 512 0" "tl128.so 128 16384 0" "tl64.so 64 16384 0"; do timeout 30 python build/gpu/tl.py $a 2>&1 | tail -9; done
