export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
S=$(date +%s)
LIBS="pb p0 p1 p2 p3" SECS=0.25 CELLS="bf16:8192 fp16:8192 bf16:4096 fp16:4096 fp32:8192 fp32:4096 fp32:32768 fp32:2048 fp32:1024 fp32:1000 bf16:2048 bf16:32 bf16:4099 fp32:512 fp32:16384 bf16:32768 fp32:8192:b bf16:8192:b bf16:1024:b fp32:32:b" timeout 150 python build/gpu/smc2.py 2>&1 | tail -20
echo softmax $(( $(date +%s) - S ))
LIBS="pp@0 pp@1 pp@2 pp@3 pp@4" DIMS=64,128,256 SEQ=512,1024,2048,16384 SECS=0.12 timeout 120 python build/gpu/bw.py time 2>&1 | tail -26
echo bw $(( $(date +%s) - S ))
timeout 40 python build/gpu/prof3.py 2>&1 | grep -v -i warn | tail -15
timeout 60 python build/gpu/host3.py 2>&1 | grep -v Warn | tail -12
echo total $(( $(date +%s) - S ))
