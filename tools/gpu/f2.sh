export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
R=/tmp/res; mkdir -p $R
b() { local begin=$SECONDS; n=$1; t=$2; shift 2; timeout $t "$@" > $R/$n.txt 2> $R/$n.err; echo "$n rc=$? $((SECONDS-begin)) s"; tar czf $OUT/res.tgz -C /tmp res; }
b attention 130 python -m benchmarks.attention --pass backward --peers flash,cudnn --seconds 0.12 --sustained-seconds 0.08 --output $R
grep -A12 "^## " $R/attention.txt | cut -c1-220 | head -40
b lengths 100 python -m benchmarks.attention --lengths uniform:1:4096 --lengths lognormal:512 --lengths outlier:32768:256:64 --lengths equal:512 --lengths equal:2048 --head-dims 64,128 --peers flash --seconds 0.15 --sustained-seconds 0.1 --output $R
grep -A12 "^## " $R/lengths.txt | cut -c1-260| head -30
b overhead 40 python -m benchmarks.overhead --seconds 0.8 --output $R
grep "|" $R/overhead.txt | head -40
b masks 40 python -m benchmarks.masks --pass backward --output $R
head -24 $R/masks.txt
b lengthsb 40 python -m benchmarks.attention --pass backward --lengths equal:512 --lengths equal:2048 --lengths uniform:1:4096 --head-dims 64,128 --seconds 0.15 --regime burst --output $R
grep "|" $R/lengthsb.txt | cut -c1-260 | head -24
for f in $R/*.err; do tail -n 2 $f | cut -c1-300; done
