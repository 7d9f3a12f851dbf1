export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
p() { n=$1; shift; timeout 200 python -m pytest -q -p no:cacheprovider --maxfail=60 "$@" > /tmp/$n.txt 2>&1; echo "$n: $(tail -1 /tmp/$n.txt)"; }
p forward tests/test_forward.py & p lengths tests/test_lengths.py & p large tests/test_masks.py tests/test_large.py & p compile tests/test_compile.py &
p transforms tests/test_transforms.py tests/test_backward_transforms.py & p bwshapes tests/test_backward.py -k "shapes" & p bw tests/test_backward.py -k "not shapes" &
p rest tests --ignore tests/host --ignore tests/test_lengths.py --ignore tests/test_forward.py --ignore tests/test_masks.py --ignore tests/test_large.py --ignore tests/test_compile.py --ignore tests/test_transforms.py --ignore tests/test_backward_transforms.py --ignore tests/test_backward.py &
for t in memcheck racecheck synccheck initcheck; do (PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 120 compute-sanitizer --tool $t $([ $t = initcheck ] && echo --check-api-memory-access no) python build/gpu/san.py > /tmp/san_$t.txt 2>&1; echo "$t rc=$? $(grep -E 'calls|SUMMARY' /tmp/san_$t.txt | tr '\n' ' ')") & done
wait
tar czf $OUT/tests.tgz -C /tmp $(cd /tmp; ls *.txt)
for f in /tmp/*.txt; do grep -hE "^(FAILED|ERROR)" $f | cut -c1-180 | head -12; done
