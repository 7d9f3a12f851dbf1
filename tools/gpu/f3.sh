export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 XLA_PYTHON_CLIENT_PREALLOCATE=false
p() { n=$1; shift; timeout ${T:-200} python -m pytest -q -p no:cacheprovider --maxfail=60 "$@" > /tmp/$n.txt 2>&1; echo "$n: $(tail -1 /tmp/$n.txt)"; }
p jax tests/test_jax.py & p softmax tests/test_softmax.py & p transformers tests/test_transformers.py & p examples tests/test_distributed.py tests/test_examples.py &
p forward tests/test_forward.py & p lengths tests/test_lengths.py & p large tests/test_masks.py tests/test_large.py & p compile tests/test_compile.py &
p transforms tests/test_transforms.py tests/test_backward_transforms.py & p bwshapes tests/test_backward.py -k "shapes" & p bwa tests/test_backward.py -k "test_lengths_and or test_empty or test_nested" & p bwb tests/test_backward.py -k "not shapes and not more_heads and not test_lengths_and and not test_empty and not test_nested" & p crowds tests/test_backward.py -k more_heads &
p faces tests/test_sdpa.py tests/test_flash_attn.py tests/test_partial.py &
p rest tests --ignore tests/host $(for t in lengths forward masks large compile transforms backward_transforms backward sdpa flash_attn partial transformers distributed examples jax softmax; do echo --ignore tests/test_$t.py; done) &
(timeout 190 python build/gpu/hostile.py empty dense ragged deterministic long many graphs streams busy jax softmax > /tmp/hostile.txt 2>&1; tail -14 /tmp/hostile.txt) &
(timeout 100 python build/gpu/stress.py 5 60 > /tmp/stress.txt 2>&1; tail -2 /tmp/stress.txt) &
for s in 3 4 5; do (timeout 150 python build/gpu/smstress.py $s 110 > /tmp/smstress$s.txt 2>&1; tail -3 /tmp/smstress$s.txt | grep -v Warn) & done
(PATH=$PATH:/usr/local/cuda/bin timeout 100 python tests/sanitize.py memcheck --parts softmax > /tmp/san_softmax.txt 2>&1; tail -1 /tmp/san_softmax.txt | cut -c1-150) &
for t in memcheck racecheck synccheck; do (PYTORCH_NO_CUDA_MEMORY_CACHING=1 FAM=$([ $t = racecheck ] && echo sm80 || echo sm90) timeout 150 compute-sanitizer --tool $t python build/gpu/san.py > /tmp/san_$t.txt 2>&1; echo "$t rc=$? $(grep -E 'calls|SUMMARY' /tmp/san_$t.txt | tr '\n' ' ')") & done
wait
timeout 60 python build/gpu/hostile.py wild > /tmp/wild.txt 2>&1; tail -2 /tmp/wild.txt
tar czf $OUT/tests.tgz -C /tmp $(cd /tmp; ls *.txt)
for f in /tmp/*.txt; do grep -hE "^(FAILED|ERROR)" $f | cut -c1-180 | head -12; done
echo T; date
