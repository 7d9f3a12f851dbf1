# z3.sh HASH: benchmarks of what changed (backward sm90 everywhere, packed equal lengths)
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 FLASH_CUTE_COMMIT=$1 OMP_NUM_THREADS=2
R=/tmp/results; mkdir -p $R; S=$(date +%s)
b() { n=$1; shift; s=$(date +%s); timeout ${T:-150} python -m "$@" --output $R > /tmp/b_$n.log 2>&1; echo "$n rc=$? $(( $(date +%s) - s )) s: $(tail -1 /tmp/b_$n.log | cut -c1-150)"; tar czf $OUT/r.tgz -C $R . -C /tmp $(cd /tmp; ls b_*.log 2>/dev/null); }
BW="benchmarks.attention --pass backward"
L="--lengths uniform:1:4096 --lengths lognormal:512 --lengths outlier:32768:256:64 --lengths equal:512 --lengths equal:2048"
O="--shape 32,21,21,512,512,96 --shape 8,21,21,2048,2048,96 --shape 1,21,21,16384,16384,96 --shape 32,10,10,512,512,192 --shape 8,10,10,2048,2048,192 --shape 1,10,10,16384,16384,192"
T=190 b bwd $BW --families 'sm90,sm90 deterministic,sm80' --peers 'flash,flash deterministic,cudnn' --seconds 0.05 --sustained-seconds 0.25
T=45 b lengthsb benchmarks.attention $L --head-dims 64,128 --peers flash --seconds 0.1 --regime burst --name lengths-burst
T=45 b lengthsbw $BW --lengths equal:512 --lengths equal:2048 --lengths uniform:1:4096 --head-dims 64,128,256 --families sm90 --peers flash --seconds 0.1 --regime burst
T=45 b otherbw $BW --name other-head-dims-backward --families sm80,sm90 --peers flash,cudnn --regime burst --seconds 0.05 $O
T=60 b acc benchmarks.accuracy --pass backward
T=40 b masksbw benchmarks.masks --pass backward --seconds 0.3 --regime burst
T=30 b eq256 benchmarks.attention --lengths equal:512 --lengths equal:2048 --head-dims 256 --peers flash --seconds 0.1 --regime burst --name lengths-256
echo total $(( $(date +%s) - S ))
