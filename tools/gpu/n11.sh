export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
FC_F=264 LIBS="o1@264 o1@132 o1@66 o1@1" DIMS=64,128 SEQ=512,1024,2048 SECS=0.12 timeout 170 python build/gpu/bw.py time 2>&1 | grep -v Warn
LIBS="o1@264 o1@132 o1@1" DIMS=256 SEQ=512,2048 SECS=0.1 timeout 170 python build/gpu/bw.py time 2>&1 | grep -v Warn
LIBS="o1@264 o1@132 o1@1" DIMS=64,128 SEQ=16384 SECS=0.1 timeout 170 python build/gpu/bw.py time 2>&1 | grep -v Warn
