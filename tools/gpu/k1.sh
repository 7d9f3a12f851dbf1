export PYTHONPATH=$PWD
ncu --set full --kernel-name regex:"forward_kernel|flash_fwd|backward_kernel|flash_bwd_dq" -o $OUT/sm80 -f python build/gpu/k1.py fwd bwd > $OUT/log.txt 2>&1; tail -3 $OUT/log.txt
ncu --import $OUT/sm80.ncu-rep --csv --page raw --metrics gpu__time_duration.sum,sm__cycles_elapsed.max,sm__inst_executed_pipe_tensor.sum,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active,sm__inst_executed_pipe_tensor_op_hmma.sum,sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active,sm__inst_issued.avg.pct_of_peak_sustained_active,l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed,l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum,sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active,launch__registers_per_thread,sm__warps_active.avg.pct_of_peak_sustained_active > $OUT/raw.csv
ncu --import $OUT/sm80.ncu-rep --page details > $OUT/details.txt
python - <<'P'
import csv,os
rows=list(csv.reader(open(os.environ["OUT"]+"/raw.csv")))
h=rows[0]; 
for r in rows[2:]:
    print(r[h.index("Kernel Name")][:60]); print("  ",{k.split("__")[-1][:50]:v for k,v in zip(h,r) if "__" in k})
P
