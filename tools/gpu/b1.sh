export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
R=/tmp/res; mkdir -p $R
b() { local begin=$SECONDS; n=$1; t=$2; shift 2; timeout $t "$@" > $R/$n.txt 2> $R/$n.err; echo "$n rc=$? $((SECONDS-begin)) s"; tar czf $OUT/res.tgz -C /tmp res; }
b attention 130 python -m benchmarks.attention --pass backward --peers flash,cudnn --seconds 0.2 --sustained-seconds 0.12 --output $R
grep -A12 "^## " $R/attention.txt | head -60
b overhead 40 python -m benchmarks.overhead --seconds 1.2 --output $R
grep -E "microsec|flash_cute|SDPA|aten flash|step" $R/overhead.txt | head -40
b masks 40 python -m benchmarks.masks --pass backward --output $R
head -30 $R/masks.txt
b lengths 40 python -m benchmarks.attention --pass backward --lengths equal:512 --lengths equal:2048 --lengths uniform:1:4096 --head-dims 64,128 --seconds 0.2 --regime burst --output $R
grep "|" $R/lengths.txt | cut -c1-260 | head -24
b accuracy 60 python -m benchmarks.accuracy --pass backward --output $R
tail -40 $R/accuracy.txt | cut -c1-200
b fp16 40 python -m benchmarks.attention --pass backward --dtype fp16 --regime burst --peers flash --seqlens 512,2048,16384 --seconds 0.15 --name attention-fp16-backward --output $R
grep -A12 "^## " $R/fp16.txt | head -20
for f in $R/*.err; do tail -n 2 $f | cut -c1-300; done
