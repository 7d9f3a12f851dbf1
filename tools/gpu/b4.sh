export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 FLASH_CUTE_COMMIT=$1 XLA_PYTHON_CLIENT_PREALLOCATE=false OMP_NUM_THREADS=2
R=/tmp/results; mkdir -p $R; S=$(date +%s)
b() { n=$1; shift; s=$(date +%s); timeout ${T:-150} python -m "$@" --output $R > /tmp/b_$n.log 2>&1; echo "$n rc=$? $(( $(date +%s) - s )) s: $(tail -1 /tmp/b_$n.log | cut -c1-150)"; tar czf $OUT/r.tgz -C $R . -C /tmp $(cd /tmp; ls b_*.log t_*.txt 2>/dev/null); }
BW="benchmarks.attention --pass backward"
timeout 100 python -m pytest -q -p no:cacheprovider --maxfail=20 tests/test_softmax.py > /tmp/t_softmax.txt 2>&1; tail -1 /tmp/t_softmax.txt; grep -hE "^(FAILED|ERROR)" /tmp/t_softmax.txt | cut -c1-180 | head
T=60 b softmax benchmarks.softmax --seconds 0.02 --columns 32 512 1024 2048 4096 4099 8192 16384 32768 50257 65536 131072 1048576
T=150 b grid $BW --families 'sm90,sm90 deterministic,sm80' --peers 'flash,flash deterministic,cudnn' --seconds 0.05 --sustained-seconds 0.04
T=60 b lengths benchmarks.attention --lengths uniform:1:4096 --lengths lognormal:512 --lengths outlier:32768:256:64 --lengths equal:512 --lengths equal:2048 --head-dims 64,128 --peers flash --seconds 0.1 --regime burst
T=40 b lengthsb $BW --lengths equal:512 --lengths equal:2048 --lengths uniform:1:4096 --head-dims 64,128 --families sm90 --peers flash --seconds 0.1 --regime burst
T=40 b masks benchmarks.masks --pass backward --seconds 1.5
[ $(( $(date +%s) - S )) -lt 290 ] && T=40 b other $BW --name other-head-dims-backward --families sm90 --peers flash,cudnn --regime burst --seconds 0.05 --shape 32,21,21,512,512,96 --shape 8,21,21,2048,2048,96 --shape 1,21,21,16384,16384,96 --shape 32,10,10,512,512,192 --shape 8,10,10,2048,2048,192 --shape 1,10,10,16384,16384,192
[ $(( $(date +%s) - S )) -lt 310 ] && (timeout 60 python -m pytest -q -p no:cacheprovider tests/test_jax.py -k "cuda or kernels or grad or graph" > /tmp/t_jax.txt 2>&1; tail -1 /tmp/t_jax.txt)
tar czf $OUT/r.tgz -C $R . -C /tmp $(cd /tmp; ls b_*.log t_*.txt 2>/dev/null); echo total $(( $(date +%s) - S ))
