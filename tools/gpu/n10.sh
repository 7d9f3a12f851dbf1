export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
for l in x1 y1; do timeout 100 python build/gpu/chk.py $l 64,128,256 2>&1 | tail -2 & done; wait
LIBS="x1 y1" DET="x1 y1" DIMS=64,128 SEQ=512,1024,2048,16384 SECS=0.15 timeout 170 python build/gpu/bw.py time 2>&1 | grep -v Warn
LIBS="x1 y1" DET="x1 y1" DIMS=256 SEQ=512,2048,16384 SECS=0.12 timeout 170 python build/gpu/bw.py time 2>&1 | grep -v Warn
