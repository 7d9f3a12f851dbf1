export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 FLASH_CUTE_COMMIT=$1 XLA_PYTHON_CLIENT_PREALLOCATE=false OMP_NUM_THREADS=2
R=/tmp/results; mkdir -p $R
p() { n=$1; shift; timeout 200 python -m pytest -q -p no:cacheprovider --maxfail=60 "$@" > /tmp/t_$n.txt 2>&1; echo "$n: $(tail -1 /tmp/t_$n.txt)"; grep -hE "^(FAILED|ERROR)" /tmp/t_$n.txt | cut -c1-160; }
p a tests/test_backward.py -k "sm90 and 256" & p b tests/test_backward.py -k "sm90 and 192" & p c tests/test_backward.py -k "sm90 and not 256 and not 192 and not more_heads" & p d tests/test_backward.py -k "sm80 and (single or blind)" & FLASH_CUTE_TEST_SEED=18 p e tests/test_backward.py -k "sm90 and (single or blind or left)" &
p f tests/test_backward.py -k "sm90 and more_heads" & p g tests/test_build_report.py tests/test_contract.py & wait
[ -f build/gpu/hostile.py ] && timeout 100 python build/gpu/hostile.py 2>&1 | tail -25 | cut -c1-250
b() { n=$1; shift; s=$(date +%s); timeout ${T:-150} python -m "$@" --output $R > /tmp/b_$n.log 2>&1; echo "$n rc=$? $(( $(date +%s) - s )) s: $(tail -1 /tmp/b_$n.log | cut -c1-150)"; }
BW="benchmarks.attention --pass backward"
T=40 b accuracy benchmarks.accuracy --pass backward --seeds 3
b grid $BW --families 'sm90,sm90 deterministic,sm80' --peers flash,cudnn --seconds 0.06 --sustained-seconds 0.05
b other $BW --name other-head-dims-backward --families sm90 --peers flash,cudnn --regime burst --seconds 0.1 --shape 32,21,21,512,512,96 --shape 8,21,21,2048,2048,96 --shape 1,21,21,16384,16384,96 --shape 32,10,10,512,512,192 --shape 8,10,10,2048,2048,192 --shape 1,10,10,16384,16384,192
tar czf $OUT/r1.tgz -C $R . -C /tmp $(cd /tmp; ls b_*.log t_*.txt)
b fp16 $BW --dtype fp16 --regime burst --families sm90,sm80 --peers flash,cudnn --seqlens 512,2048,16384 --seconds 0.06 --name attention-fp16-backward
b lengths $BW --lengths equal:512 --lengths equal:2048 --lengths uniform:1:4096 --head-dims 64,128 --families sm90 --peers flash --seconds 0.1 --regime burst
T=80 b jax benchmarks.jax_attention --seconds 0.3 --seqlen 512 1024 4096 16384
tar czf $OUT/r2.tgz -C $R . -C /tmp $(cd /tmp; ls b_*.log t_*.txt)
