export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
S=$(date +%s)
for l in fin3 fin5; do (timeout 60 python build/gpu/chk.py $l 64,128 > /tmp/chk_$l.txt 2>&1; tail -4 /tmp/chk_$l.txt) & done; wait
echo chk $(( $(date +%s) - S ))
LIBS="fin fin3 fin4 fin5" DET="fin3" DIMS=64,128 SEQ=512,1024,2048,16384 SECS=0.25 timeout 100 python build/gpu/bw.py time 2>&1 | tail -20
LIBS="base fin3 fin5" SEQ=512 timeout 40 python build/gpu/prof2.py 2>&1 | tail -12
LIBS="smv1 smv2 smv3" CELLS="fp32:1000 fp32:1024 fp32:2048 fp32:4096 fp32:8192 fp32:32768 bf16:2048 bf16:4096 bf16:8192 fp16:4096 bf16:4099 fp32:4099 bf16:50257 fp32:511 bf16:511" timeout 60 python build/gpu/smc.py 2>&1 | tail -16
echo total $(( $(date +%s) - S ))
