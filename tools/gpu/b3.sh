bash build/gpu/f1.sh 2>&1 | grep -v "^seed"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 FLASH_CUTE_COMMIT=$1 XLA_PYTHON_CLIENT_PREALLOCATE=false OMP_NUM_THREADS=2
R=/tmp/results; mkdir -p $R
b() { n=$1; shift; s=$(date +%s); timeout ${T:-150} python -m "$@" --output $R > /tmp/b_$n.log 2>&1; echo "$n rc=$? $(( $(date +%s) - s )) s: $(tail -1 /tmp/b_$n.log | cut -c1-150)"; }
BW="benchmarks.attention --pass backward"
T=100 b softmax benchmarks.softmax --seconds 0.02 --columns 32 512 1024 2048 4096 8192 16384 32768 50257 65536 131072 1048576
tar czf $OUT/r1.tgz -C $R .
b grid $BW --families 'sm90,sm90 deterministic,sm80' --peers flash,cudnn --seconds 0.06 --sustained-seconds 0.05
tar czf $OUT/r2.tgz -C $R .
timeout 60 python build/gpu/hostile.py 2>&1 | tail -16 | cut -c1-220
