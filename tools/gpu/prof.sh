export PYTHONPATH=$PWD
for a in "$@"; do IFS=, read lib d s c <<< "$a"
timeout 120 ncu -k regex:backward_kernel_sm90 --launch-skip 2 --launch-count 1 --section SourceCounters --section WarpStateStats --section SpeedOfLight --section ComputeWorkloadAnalysis --section MemoryWorkloadAnalysis_Tables --section SchedulerStats -f -o /tmp/p_$lib$d python build/gpu/prof.py $lib $d $s $c > /tmp/ncu.log 2>&1; tail -2 /tmp/ncu.log
ncu -i /tmp/p_$lib$d.ncu-rep --page source --csv > $OUT/src_${lib}_$d.csv
ncu -i /tmp/p_$lib$d.ncu-rep --page details > $OUT/det_${lib}_$d.txt
done
