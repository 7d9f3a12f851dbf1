export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
S=$(date +%s)
(timeout 40 python build/gpu/chk.py c1 64,128 2>&1 | tail -2) & (timeout 40 python build/gpu/chk.py c4 64,128 2>&1 | tail -2) & wait
LIBS="y2 fin10 c1 c2 c3 c4" DIMS=64,128 SEQ=512,1024,2048,16384 SECS=0.15 timeout 100 python build/gpu/bw.py time 2>&1 | tail -20
M=dram__bytes_read.sum,dram__bytes_write.sum,lts__t_bytes.sum,lts__t_bytes.avg.pct_of_peak_sustained_elapsed,lts__t_sector_hit_rate.pct,dram__throughput.avg.pct_of_peak_sustained_elapsed,l1tex__m_xbar2l1tex_read_bytes.sum,l1tex__m_l1tex2xbar_write_bytes.sum,gpu__time_duration.sum,sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed,lts__d_sectors.sum,lts__lts2xbar_cycles_active.avg.pct_of_peak_sustained_elapsed,lts__xbar2lts_cycles_active.avg.pct_of_peak_sustained_elapsed
for n in base c1 c4; do echo "== $n"; timeout 60 ncu --metrics $M -k regex:backward_kernel -s 2 -c 1 python build/gpu/one.py $n 128 512 full 2>&1 | grep -E "__|rror" | head -20; done
LIBS="smv4" CELLS="fp32:1000 fp32:1024 fp32:2048 fp32:4096 bf16:2048 bf16:4096 bf16:8192 fp16:4096 fp16:8192 bf16:4099 fp32:4099 bf16:50257 fp32:511 bf16:511" timeout 60 python build/gpu/smc.py 2>&1 | tail -16
echo total $(( $(date +%s) - S ))
