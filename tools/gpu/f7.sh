# f7.sh HASH: unequal lengths' benchmark, then tests of lengths and their sanitizers
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 XLA_PYTHON_CLIENT_PREALLOCATE=false FLASH_CUTE_COMMIT=$1
R=/tmp/results; mkdir -p $R
L="--lengths uniform:1:4096 --lengths lognormal:512 --lengths outlier:32768:256:64 --lengths equal:512 --lengths equal:2048"
timeout 60 python -m benchmarks.attention $L --head-dims 64,128 --peers flash --seconds 0.1 --regime burst --name lengths-burst --output $R > /tmp/b.log 2>&1; tail -1 /tmp/b.log; tar czf $OUT/r.tgz -C $R .
p() { n=$1; shift; timeout ${T:-100} python -m pytest -q -p no:cacheprovider --maxfail=60 "$@" > /tmp/$n.txt 2>&1; echo "$n: $(tail -1 /tmp/$n.txt)"; }
p len1 tests/test_lengths.py -k "sm90 and packed and not padded" & p len2 tests/test_lengths.py -k "sm90 and padded" & p len3 tests/test_lengths.py -k "sm90 and not packed and not padded" & p rep tests/test_build_report.py & p fw tests/test_forward.py -k "sm90 and buckets" & p jax tests/test_jax.py & p faces tests/test_flash_attn.py tests/test_sdpa.py &
(timeout 60 python build/gpu/hostile.py ragged graphs streams empty > /tmp/h.txt 2>&1; tail -1 /tmp/h.txt) &
for t in memcheck synccheck; do (PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 95 compute-sanitizer --tool $t python -m pytest -q -p no:cacheprovider tests/test_lengths.py -k "many_tiles_of_equal and 128 and sm90 and causal and each and not almost" > /tmp/s_$t.txt 2>&1; echo "$t rc=$? $(grep -E 'passed|failed|SUMMARY' /tmp/s_$t.txt | tr '\n' ' ')") & done
(PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 95 compute-sanitizer --tool synccheck python -m pytest -q -p no:cacheprovider tests/test_lengths.py -k "many_tiles_of_equal and 128 and sm90 and before and packed and full and not almost" > /tmp/s_2.txt 2>&1; echo "synccheck2 rc=$? $(grep -E 'passed|failed|SUMMARY' /tmp/s_2.txt | tr '\n' ' ')") &
wait; tar czf $OUT/t.tgz -C /tmp $(cd /tmp; ls *.txt); for f in /tmp/*.txt; do grep -hE "^(FAILED|ERROR)" $f | cut -c1-160 | head -8; done
