# f5.sh: tests of the backward, of lengths and of memory's end; sanitizers; hostile
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 XLA_PYTHON_CLIENT_PREALLOCATE=false
p() { n=$1; shift; timeout ${T:-200} python -m pytest -q -p no:cacheprovider --maxfail=60 "$@" > /tmp/$n.txt 2>&1; echo "$n: $(tail -1 /tmp/$n.txt)"; }
p bwshapes tests/test_backward.py -k "shapes" & p bwa tests/test_backward.py -k "test_lengths_and or test_empty or test_nested" & p bwb tests/test_backward.py -k "not shapes and not more_heads and not test_lengths_and and not test_empty and not test_nested" & p crowds tests/test_backward.py -k more_heads &
p lengths tests/test_lengths.py & p transforms tests/test_transforms.py tests/test_backward_transforms.py & p compile tests/test_compile.py & p faces tests/test_sdpa.py tests/test_flash_attn.py tests/test_partial.py &
p rest tests --ignore tests/host $(for t in lengths forward masks large compile transforms backward_transforms backward sdpa flash_attn partial transformers distributed examples jax softmax; do echo --ignore tests/test_$t.py; done) &
(timeout 150 python build/gpu/hostile.py empty dense ragged deterministic long many graphs streams busy > /tmp/hostile.txt 2>&1; tail -9 /tmp/hostile.txt) &
(HOSTILE_SEED=77 timeout 120 python build/gpu/hostile.py deterministic streams ragged dense > /tmp/hostile2.txt 2>&1; tail -3 /tmp/hostile2.txt) &
(timeout 120 python build/gpu/stress.py 5 80 > /tmp/stress.txt 2>&1; tail -2 /tmp/stress.txt) & (timeout 120 python build/gpu/stress.py 11 80 > /tmp/stress2.txt 2>&1; tail -2 /tmp/stress2.txt) &
for t in memcheck synccheck; do (PYTORCH_NO_CUDA_MEMORY_CACHING=1 FAM=sm90 timeout 150 compute-sanitizer --tool $t python build/gpu/san.py > /tmp/san_$t.txt 2>&1; echo "$t rc=$? $(grep -E 'calls|SUMMARY' /tmp/san_$t.txt | tr '\n' ' ')") & done
wait
p large tests/test_masks.py tests/test_large.py & (timeout 60 python build/gpu/hostile.py wild > /tmp/wild.txt 2>&1; tail -1 /tmp/wild.txt) & wait
tar czf $OUT/tests.tgz -C /tmp $(cd /tmp; ls *.txt)
for f in /tmp/*.txt; do grep -hE "^(FAILED|ERROR)" $f | cut -c1-180 | head -12; done
echo T; date
