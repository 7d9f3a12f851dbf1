export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
for l in q4; do timeout 100 python build/gpu/chk.py $l 64,128,256 2>&1 | tail -4 & done; wait
LIBS="p6 q4" DET="" DIMS=64,128,256 SEQ=512,1024,2048,16384 SECS=0.15 timeout 170 python build/gpu/bw.py time 2>&1 | grep -v Warn
LIBS="p6 q4" SEQ=512 timeout 60 python build/gpu/prof2.py 2>&1 | grep -v Warn
