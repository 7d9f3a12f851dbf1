export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 FLASH_CUTE_COMMIT=$1 XLA_PYTHON_CLIENT_PREALLOCATE=false OMP_NUM_THREADS=2
R=/tmp/results; mkdir -p $R; S=$(date +%s)
b() { n=$1; shift; s=$(date +%s); timeout ${T:-150} python -m "$@" --output $R > /tmp/b_$n.log 2>&1; echo "$n rc=$? $(( $(date +%s) - s )) s: $(tail -1 /tmp/b_$n.log | cut -c1-150)"; tar czf $OUT/r.tgz -C $R . -C /tmp $(cd /tmp; ls b_*.log 2>/dev/null); }
timeout 40 python build/gpu/sens2.py 2>&1 | tail -12
T=80 b softmax benchmarks.softmax --seconds 0.15 --columns 32 512 1000 1024 2048 4096 4099 8192 16384 32768 50257 65536 131072 1048576
T=70 b overhead benchmarks.overhead --seconds 8; grep step /tmp/b_overhead.log
echo total $(( $(date +%s) - S ))
