# f6.sh HASH: unequal lengths' benchmark, then tests of the forward and of lengths
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 XLA_PYTHON_CLIENT_PREALLOCATE=false FLASH_CUTE_COMMIT=$1
R=/tmp/results; mkdir -p $R
L="--lengths uniform:1:4096 --lengths lognormal:512 --lengths outlier:32768:256:64 --lengths equal:512 --lengths equal:2048"
timeout 60 python -m benchmarks.attention $L --head-dims 64,128 --peers flash --seconds 0.1 --regime burst --name lengths-burst --output $R > /tmp/b.log 2>&1; tail -1 /tmp/b.log; tar czf $OUT/r.tgz -C $R .
timeout 30 python -m benchmarks.attention --lengths equal:512 --head-dims 96,192,256 --peers flash --families sm90 --seconds 0.05 --regime burst --name lengths-other --output $R > /tmp/b2.log 2>&1; grep equal $R/*/lengths-other.md | cut -d'|' -f2-10
p() { n=$1; shift; timeout ${T:-200} python -m pytest -q -p no:cacheprovider --maxfail=60 "$@" > /tmp/$n.txt 2>&1; echo "$n: $(tail -1 /tmp/$n.txt)"; }
p fw1 tests/test_forward.py -k "sm90 and not sm80" & p fw2 tests/test_forward.py -k "not sm90" & p len1 tests/test_lengths.py -k "packed" & p len2 tests/test_lengths.py -k "not packed" & p masks tests/test_masks.py tests/test_build_report.py tests/test_softmax.py & p jax tests/test_jax.py & p bw tests/test_backward.py -k "two_blocks or drawn or wild or deterministic" &
(timeout 100 python build/gpu/hostile.py dense ragged many graphs streams empty > /tmp/h.txt 2>&1; tail -2 /tmp/h.txt) &
for t in memcheck synccheck; do (PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 120 compute-sanitizer --tool $t python -m pytest -q -p no:cacheprovider tests/test_lengths.py -k "many_tiles_of_equal and 128 and alike and sm90" > /tmp/s_$t.txt 2>&1; echo "$t rc=$? $(grep -E 'passed|SUMMARY' /tmp/s_$t.txt | tr '\n' ' ')") & done
wait; tar czf $OUT/t.tgz -C /tmp $(cd /tmp; ls *.txt); for f in /tmp/*.txt; do grep -hE "^(FAILED|ERROR)" $f | cut -c1-160 | head -8; done
