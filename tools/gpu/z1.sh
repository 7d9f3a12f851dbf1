# z1.sh HASH: benchmarks of what changed (forward sm80 d64 and d96, backward sm80, sm90 unequal lengths)
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 FLASH_CUTE_COMMIT=$1 OMP_NUM_THREADS=2
R=/tmp/results; mkdir -p $R; S=$(date +%s)
b() { n=$1; shift; s=$(date +%s); timeout ${T:-150} python -m "$@" --output $R > /tmp/b_$n.log 2>&1; echo "$n rc=$? $(( $(date +%s) - s )) s: $(tail -1 /tmp/b_$n.log | cut -c1-150)"; tar czf $OUT/r.tgz -C $R . -C /tmp $(cd /tmp; ls b_*.log 2>/dev/null); }
BW="benchmarks.attention --pass backward"
L="--lengths uniform:1:4096 --lengths lognormal:512 --lengths outlier:32768:256:64 --lengths equal:512 --lengths equal:2048"
for t in memcheck synccheck; do (PYTORCH_NO_CUDA_MEMORY_CACHING=1 FAM=sm80 timeout 70 compute-sanitizer --tool $t python build/gpu/san.py > /tmp/b_san_$t.log 2>&1; echo "sm80 $t rc=$? $(grep -E 'calls|SUMMARY' /tmp/b_san_$t.log | tr '\n' ' ')") & done; wait
T=110 b lengthsb benchmarks.attention $L --head-dims 64,128 --peers flash --seconds 0.1 --regime burst --name lengths-burst
T=150 b fwd benchmarks.attention --seconds 0.06 --sustained-seconds 0.25
T=190 b bwd $BW --families 'sm90,sm90 deterministic,sm80' --peers 'flash,flash deterministic,cudnn' --seconds 0.05 --sustained-seconds 0.25
O="--shape 32,21,21,512,512,96 --shape 8,21,21,2048,2048,96 --shape 1,21,21,16384,16384,96 --shape 32,10,10,512,512,192 --shape 8,10,10,2048,2048,192 --shape 1,10,10,16384,16384,192"
[ $(( $(date +%s) - S )) -lt 480 ] && T=45 b otherbw $BW --name other-head-dims-backward --families sm80,sm90 --peers flash,cudnn --regime burst --seconds 0.05 $O
[ $(( $(date +%s) - S )) -lt 490 ] && T=45 b other benchmarks.attention --name other-head-dims --families sm80,sm90 --peers flash,cudnn --regime burst --seconds 0.05 $O
echo total $(( $(date +%s) - S ))
