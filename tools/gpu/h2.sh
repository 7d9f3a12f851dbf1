export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 XLA_PYTHON_CLIENT_PREALLOCATE=false FLASH_CUTE_COMMIT=$1
S=$(date +%s); R=/tmp/results; mkdir -p $R
LIBS="v0 v1 v2" timeout 80 python build/gpu/fw.py 2>&1 | tail -20
echo fw $(( $(date +%s) - S ))
timeout 100 python -m benchmarks.softmax --seconds 0.15 --columns 32 512 1000 1024 2048 4096 4099 8192 16384 32768 50257 65536 131072 1048576 --output $R > /tmp/b_softmax.log 2>&1; tail -1 /tmp/b_softmax.log
echo softmax $(( $(date +%s) - S ))
timeout 100 python -m benchmarks.overhead --output $R > /tmp/b_overhead.log 2>&1; grep -E "step" /tmp/b_overhead.log
echo overhead $(( $(date +%s) - S ))
tar czf $OUT/r.tgz -C $R . -C /tmp $(cd /tmp; ls b_*.log t_*.txt 2>/dev/null)
(timeout 100 python -m pytest -q -p no:cacheprovider --maxfail=20 tests/test_softmax.py > /tmp/t_softmax.txt 2>&1; tail -1 /tmp/t_softmax.txt) &
(timeout 110 python build/gpu/hostile.py softmax > /tmp/t_hostile.txt 2>&1; tail -3 /tmp/t_hostile.txt) &
for t in memcheck racecheck synccheck; do (PATH=$PATH:/usr/local/cuda/bin timeout 110 python tests/sanitize.py $t --parts softmax > /tmp/t_san_$t.txt 2>&1; echo "rc=$? $(tail -2 /tmp/t_san_$t.txt | cut -c1-200)") & done
(timeout 100 python -m pytest -q -p no:cacheprovider --maxfail=20 tests/test_jax.py -k "softmax" > /tmp/t_jax.txt 2>&1; tail -1 /tmp/t_jax.txt) &
wait; tar czf $OUT/r.tgz -C $R . -C /tmp $(cd /tmp; ls b_*.log t_*.txt 2>/dev/null); echo total $(( $(date +%s) - S ))
