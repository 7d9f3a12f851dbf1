export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4 FLASH_CUTE_COMMIT=$1
S=$(date +%s); R=/tmp/results; mkdir -p $R
timeout 200 python -m benchmarks.training --seconds 0.3 --output $R > /tmp/b_training.log 2>&1; tail -14 /tmp/b_training.log
tar czf $OUT/r.tgz -C $R . -C /tmp b_training.log; echo training $(( $(date +%s) - S ))
export OMP_NUM_THREADS=2
timeout 120 python -m benchmarks.overhead --seconds 9 --output $R > /tmp/b_overhead.log 2>&1; grep -E "step|forward \|" /tmp/b_overhead.log
tar czf $OUT/r.tgz -C $R . -C /tmp b_training.log b_overhead.log; echo total $(( $(date +%s) - S ))
