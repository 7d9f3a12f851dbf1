export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
for l in v1 v2 v3; do timeout 100 python build/gpu/chk.py $l 64,128,256 2>&1 | tail -2 & done; wait
LIBS="p6 u3 v1 v3" DET="p6 v1" DIMS=64,128 SEQ=512,2048,16384 SECS=0.15 timeout 170 python build/gpu/bw.py time 2>&1 | grep -v Warn
LIBS="p6 v1 v2" DET="p6 v1 v2" DIMS=256 SEQ=512,2048,16384 SECS=0.15 timeout 170 python build/gpu/bw.py time 2>&1 | grep -v Warn
timeout 60 build/gpu/probe
timeout 100 python -m pytest -q -p no:cacheprovider -k unknown_stride tests/test_softmax.py 2>&1 | tail -60 | cut -c1-200
