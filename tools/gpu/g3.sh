export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
S=$(date +%s)
timeout 60 python build/gpu/chk.py fin8 64,128 2>&1 | tail -4
LIBS="fin8 fin9 fin10" DET="fin8" DIMS=64,128 SEQ=512,1024,2048,16384 SECS=0.2 timeout 100 python build/gpu/bw.py time 2>&1 | tail -20
LIBS="base fin8 fin10" SEQ=512 timeout 40 python build/gpu/prof2.py 2>&1 | tail -12
echo total $(( $(date +%s) - S ))
