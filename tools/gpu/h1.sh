export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
S=$(date +%s)
for sh in 1,2,64,64 4,8,128,128; do (cd build/gpu/old; PYTHONPATH=$PWD SHAPE=$sh timeout 60 python ../host2.py 2>&1 | tail -3 | sed 's/^/old /'); SHAPE=$sh timeout 60 python build/gpu/host2.py 2>&1 | tail -3; done
echo host $(( $(date +%s) - S ))
LIBS="s1 s7 s8 s2 s6 s4" SECS=0.35 CELLS="bf16:8192 fp16:8192 bf16:4096 fp16:4096 fp32:8192 fp32:4096 bf16:2048 fp16:8192 bf16:8192" timeout 120 python build/gpu/smc.py 2>&1 | tail -16
PROF=1 timeout 60 python build/gpu/host2.py 2>&1 | tail -32
echo total $(( $(date +%s) - S ))
