export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
for l in w1; do timeout 100 python build/gpu/chk.py $l 64,128,256 2>&1 | tail -2 & done; wait
LIBS="p6 v1 w1" DIMS=64,128,256 SEQ=512,2048,16384 SECS=0.15 timeout 170 python build/gpu/bw.py time 2>&1 | grep -v Warn
