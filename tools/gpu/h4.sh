export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
S=$(date +%s)
timeout 60 python build/gpu/prof3.py 2>&1 | grep -v -i warn | tail -18
LIBS="pp@0 pp@1 pp@2 pp@3 pp@4 pp@5" DIMS=64,128,256 SEQ=512,2048 SECS=0.12 timeout 120 python build/gpu/bw.py time 2>&1 | tail -26
echo total $(( $(date +%s) - S ))
