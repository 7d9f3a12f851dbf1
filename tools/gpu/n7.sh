export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
for l in t1 t2 u2 u3; do timeout 100 python build/gpu/chk.py $l 64,128,256 2>&1 | tail -2 & done; wait
LIBS="p6 u2 u3" DIMS=64,128 SEQ=512,2048,16384 SECS=0.15 timeout 170 python build/gpu/bw.py time 2>&1 | grep -v Warn
LIBS="p6" SEQS=512,2048,16384 timeout 170 python build/gpu/det.py 2>&1 | grep -v Warn
for a in "tl128.so 128 512 0" "tl64.so 64 512 0"; do timeout 30 python build/gpu/tl.py $a 2>&1 | tail -8; done
