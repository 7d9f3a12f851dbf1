export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
S=$(date +%s)
LIBS="c1 c3 c8 c9" DIMS=64,128 SEQ=512,1024,2048,16384 SECS=0.1 timeout 100 python build/gpu/bw.py time 2>&1 | tail -20
M=dram__bytes_read.sum,dram__bytes_write.sum,gpu__time_duration.sum,lts__t_sector_hit_rate.pct
for n in c8 c9; do echo "== $n"; timeout 60 ncu --metrics $M -k regex:backward_kernel -s 2 -c 1 python build/gpu/one.py $n 128 512 full 2>&1 | grep -E "__|rror" | head -20; done
echo total $(( $(date +%s) - S ))
