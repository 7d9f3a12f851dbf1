export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
for l in p6 f1; do timeout 100 python build/gpu/chk.py $l 64,128,256 2>&1 | tail -4 & done; wait
FC_F=0.7 timeout 60 compute-sanitizer --tool memcheck python build/gpu/chk.py f1 64 2>&1 | tail -3
LIBS="p6 f1@0.4 f1@0.7 f1@1.1" DET="p6 f1@0.7" DIMS=64,128 SEQ=512,1024,2048 SECS=0.12 timeout 170 python build/gpu/bw.py time 2>&1 | grep -v Warn
LIBS="m0 p6 f1@0.7 f1@1.2" DET="m0 p6 f1@1.2" DIMS=256 SEQ=512,1024,2048,16384 SECS=0.1 timeout 170 python build/gpu/bw.py time 2>&1 | grep -v Warn
LIBS="p6 f1" DET="p6 f1" DIMS=64,128 SEQ=16384 SECS=0.12 timeout 170 python build/gpu/bw.py time 2>&1 | grep -v Warn
LIBS="f1" SEQ=512,1024 timeout 60 python build/gpu/prof2.py 2>&1 | grep -v Warn
