export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 FLASH_CUTE_COMMIT=$1
R=/tmp/results; mkdir -p $R
b() { n=$1; shift; s=$(date +%s); timeout ${T:-150} python -m "$@" --output $R > /tmp/b_$n.log 2>&1; echo "$n rc=$? $(( $(date +%s) - s )) s: $(tail -1 /tmp/b_$n.log | cut -c1-150)"; }
BW="benchmarks.attention --pass backward"
b grid $BW --families 'sm90,sm90 deterministic,sm80' --peers flash,cudnn --seconds 0.06 --sustained-seconds 0.05
b lengths $BW --lengths equal:512 --lengths equal:2048 --lengths uniform:1:4096 --head-dims 64,128 --families sm90,sm80 --peers flash --seconds 0.1 --regime burst
b masks benchmarks.masks --pass backward --seconds 2
b other $BW --name other-head-dims-backward --families sm90 --peers flash,cudnn --regime burst --seconds 0.1 --shape 32,21,21,512,512,96 --shape 8,21,21,2048,2048,96 --shape 1,21,21,16384,16384,96 --shape 32,10,10,512,512,192 --shape 8,10,10,2048,2048,192 --shape 1,10,10,16384,16384,192
b fp16 $BW --dtype fp16 --regime burst --families sm90,sm80 --peers flash,cudnn --seqlens 512,2048,16384 --seconds 0.06 --name attention-fp16-backward
tar czf $OUT/r1.tgz -C $R . -C /tmp $(cd /tmp; ls b_*.log)
T=100 b softmax benchmarks.softmax --seconds 0.02 --columns 32 512 1024 2048 4096 8192 16384 32768 50257 65536 131072 1048576
T=100 b jax benchmarks.jax_attention --seconds 0.4 --seqlen 512 1024 4096 16384
T=60 b accuracy benchmarks.accuracy --pass backward --seeds 3
T=60 b overhead benchmarks.overhead --seconds 0.5
tar czf $OUT/r2.tgz -C $R . -C /tmp $(cd /tmp; ls b_*.log)
