export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 FLASH_CUTE_COMMIT=$1 OMP_NUM_THREADS=2 XLA_PYTHON_CLIENT_PREALLOCATE=false
R=/tmp/results; mkdir -p $R
L="--lengths uniform:1:4096 --lengths lognormal:512 --lengths outlier:32768:256:64 --lengths equal:512 --lengths equal:2048"
timeout 60 python -m benchmarks.attention $L --head-dims 64,128 --peers flash --seconds 0.1 --regime burst --name lengths-burst --output $R > /tmp/b.log 2>&1; tail -1 /tmp/b.log; tar czf $OUT/r.tgz -C $R .
p() { n=$1; shift; timeout 115 python -m pytest -q -p no:cacheprovider --maxfail=60 "$@" > /tmp/$n.txt 2>&1; echo "$n: $(tail -1 /tmp/$n.txt)"; grep -hE "^(FAILED|ERROR)" /tmp/$n.txt | cut -c1-180 | head -5; }
p f1 tests/test_forward.py -k "sm80 and not sm90" & p l1 tests/test_lengths.py -k "sm80" & p m1 tests/test_masks.py tests/test_large.py -k sm80 & p j tests/test_jax.py & p rep tests/test_build_report.py &
(timeout 60 python build/gpu/hostile.py empty dense ragged long many > /tmp/h.txt 2>&1; tail -1 /tmp/h.txt) &
for t in memcheck synccheck; do (PYTORCH_NO_CUDA_MEMORY_CACHING=1 FAM=sm80 timeout 70 compute-sanitizer --tool $t python build/gpu/san.py > /tmp/s_$t.txt 2>&1; echo "sm80 $t rc=$? $(grep -E 'calls|SUMMARY' /tmp/s_$t.txt | tr '\n' ' ')") & done
wait; tar czf $OUT/t.tgz -C /tmp $(cd /tmp; ls *.txt)
