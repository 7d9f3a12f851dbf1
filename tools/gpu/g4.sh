export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
S=$(date +%s)
for n in y1 y3; do timeout 30 python build/gpu/chk.py $n 64,128 2>&1 | tail -2 & done; wait
LIBS="base fin8 x1 x2 x4 y1 y2 y3" SEQ=512 timeout 60 python build/gpu/prof2.py 2>&1 | grep -v preproc.*zzz | sed 's/backward_preprocess/pre/; s/span.*//' | tail -40
LIBS="fin8 y1 y2 y3" DIMS=64,128 SEQ=512,1024,2048,16384 SECS=0.15 timeout 100 python build/gpu/bw.py time 2>&1 | tail -20
echo total $(( $(date +%s) - S ))
