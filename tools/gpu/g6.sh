export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
S=$(date +%s)
(timeout 40 python build/gpu/chk.py c6 64,128 2>&1 | tail -2) & (timeout 40 python build/gpu/chk.py c7 64,128 2>&1 | tail -2) & wait
LIBS="c1 c5 c6 c7" DIMS=64,128 SEQ=512,1024,2048,16384 SECS=0.15 timeout 100 python build/gpu/bw.py time 2>&1 | tail -20
M=dram__bytes_read.sum,dram__bytes_write.sum,gpu__time_duration.sum,lts__t_sector_hit_rate.pct
for n in c5 c6 c7; do echo "== $n"; timeout 60 ncu --metrics $M -k regex:backward_kernel -s 2 -c 1 python build/gpu/one.py $n 128 512 full 2>&1 | grep -E "__|rror" | head -20; done
LIBS="smv5" CELLS="fp32:1000 fp32:1024 bf16:4099 fp32:4099 bf16:50257 fp32:511 bf16:511" timeout 60 python build/gpu/smc.py 2>&1 | tail -16
echo total $(( $(date +%s) - S ))
