export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 FLASH_CUTE_COMMIT=$1 XLA_PYTHON_CLIENT_PREALLOCATE=false OMP_NUM_THREADS=2
R=/tmp/results; mkdir -p $R; S=$(date +%s)
p() { n=$1; shift; timeout ${T:-150} python -m pytest -q -p no:cacheprovider --maxfail=60 "$@" > /tmp/t_$n.txt 2>&1; echo "$n: $(tail -1 /tmp/t_$n.txt)"; }
p bwshapes tests/test_backward.py -k "shapes and sm90" & p bwa tests/test_backward.py -k "(test_lengths_and or test_empty or test_nested) and sm90" & p bwb tests/test_backward.py -k "sm90 and not shapes and not more_heads and not test_lengths_and and not test_empty and not test_nested" & p crowds tests/test_backward.py -k "more_heads and sm90" &
p bwrest tests/test_backward.py -k "not sm90 and not sm80" & p transforms tests/test_backward_transforms.py & p report tests/test_build_report.py & p jax tests/test_jax.py -k "grad or kernels or cuda or workspace" &
(timeout 100 python build/gpu/hostile.py empty dense ragged deterministic many graphs streams busy > /tmp/t_hostile.txt 2>&1; tail -1 /tmp/t_hostile.txt) &
(timeout 100 python build/gpu/stress.py 7 40 > /tmp/t_stress.txt 2>&1; tail -1 /tmp/t_stress.txt) &
for t in memcheck synccheck; do (PYTORCH_NO_CUDA_MEMORY_CACHING=1 FAM=sm90 timeout 120 compute-sanitizer --tool $t python build/gpu/san.py > /tmp/t_san_$t.txt 2>&1; echo "$t rc=$? $(grep -E 'calls|SUMMARY' /tmp/t_san_$t.txt | tr '\n' ' ')") & done
wait; timeout 40 python build/gpu/hostile.py wild > /tmp/t_wild.txt 2>&1; tail -1 /tmp/t_wild.txt
for f in /tmp/t_*.txt; do grep -hE "^(FAILED|ERROR)" $f | cut -c1-180 | head -12; done; echo tests $(( $(date +%s) - S ))
b() { n=$1; shift; s=$(date +%s); timeout ${T:-150} python -m "$@" --output $R > /tmp/b_$n.log 2>&1; echo "$n rc=$? $(( $(date +%s) - s )) s: $(tail -1 /tmp/b_$n.log | cut -c1-150)"; tar czf $OUT/r.tgz -C $R . -C /tmp $(cd /tmp; ls b_*.log t_*.txt 2>/dev/null); }
BW="benchmarks.attention --pass backward"
T=180 b grid $BW --families 'sm90,sm90 deterministic,sm80' --peers 'flash,flash deterministic,cudnn' --seconds 0.05 --sustained-seconds 0.25
T=40 b lengthsb $BW --lengths equal:512 --lengths equal:2048 --lengths uniform:1:4096 --head-dims 64,128 --families sm90 --peers flash --seconds 0.1 --regime burst
T=40 b masks benchmarks.masks --pass backward --seconds 1 --regime burst
T=40 b other $BW --name other-head-dims-backward --families sm90 --peers flash,cudnn --regime burst --seconds 0.05 --shape 32,21,21,512,512,96 --shape 8,21,21,2048,2048,96 --shape 1,21,21,16384,16384,96 --shape 32,10,10,512,512,192 --shape 8,10,10,2048,2048,192 --shape 1,10,10,16384,16384,192
[ $(( $(date +%s) - S )) -lt 350 ] && T=50 b fp16 $BW --dtype fp16 --regime burst --families sm90,sm80 --peers flash,cudnn --seqlens 512,2048,16384 --seconds 0.05 --name attention-fp16-backward
LIBS="sxa sxb sxc" SECS=0.1 CELLS="bf16:8192 fp16:8192 bf16:4096 fp32:8192 fp32:32768 fp32:1024 bf16:2048" timeout 25 python build/gpu/smc.py 2>&1 | tail -8
[ $(( $(date +%s) - S )) -lt 380 ] && T=75 b training benchmarks.training --seconds 0.2
echo total $(( $(date +%s) - S ))
