export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 XLA_PYTHON_CLIENT_PREALLOCATE=false FLASH_CUTE_COMMIT=$1
S=$(date +%s)
(timeout 100 python -m pytest -q -p no:cacheprovider --maxfail=20 tests/test_softmax.py > /tmp/t_softmax.txt 2>&1; tail -1 /tmp/t_softmax.txt) &
(timeout 110 python build/gpu/hostile.py softmax empty jax dense > /tmp/t_hostile.txt 2>&1; tail -6 /tmp/t_hostile.txt) &
(timeout 100 python -m pytest -q -p no:cacheprovider --maxfail=20 tests/test_backward.py -k "shapes and sm90" > /tmp/t_bw.txt 2>&1; tail -1 /tmp/t_bw.txt) &
for t in memcheck racecheck synccheck; do (PATH=$PATH:/usr/local/cuda/bin timeout 110 python tests/sanitize.py $t --parts softmax > /tmp/t_san_$t.txt 2>&1; echo "rc=$? $(tail -2 /tmp/t_san_$t.txt | cut -c1-200)") & done
wait; echo tests $(( $(date +%s) - S ))
R=/tmp/results; mkdir -p $R
T=80; timeout $T python -m benchmarks.softmax --seconds 0.1 --columns 32 512 1000 1024 2048 4096 4099 8192 16384 32768 50257 65536 131072 1048576 --output $R > /tmp/b_softmax.log 2>&1; tail -1 /tmp/b_softmax.log
timeout 30 python -m benchmarks.masks --pass backward --seconds 1 --regime burst --output $R > /tmp/b_masks.log 2>&1; tail -16 /tmp/b_masks.log
tar czf $OUT/r.tgz -C $R . -C /tmp $(cd /tmp; ls b_*.log t_*.txt 2>/dev/null); echo total $(( $(date +%s) - S ))
