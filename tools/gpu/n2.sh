export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
for l in p4 p5 s1; do timeout 100 python build/gpu/chk.py $l 64,128 2>&1 | tail -4 & done; wait
LIBS="m0 p3 p4 p5 s1" DET="m0 p4 p5 s1" DIMS=64,128 SEQ=512,1024,2048,16384 SECS=0.15 timeout 170 python build/gpu/bw.py time 2>&1 | grep -v Warn
LIBS="m0 p4 s1" SEQ=512,1024,2048 timeout 60 python build/gpu/prof2.py 2>&1 | grep -v Warn
