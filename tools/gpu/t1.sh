export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
p() { n=$1; shift; timeout 330 python -m pytest -q -p no:cacheprovider --maxfail=30 "$@" > /tmp/$n.txt 2>&1; echo "$n: $(tail -1 /tmp/$n.txt)"; }
cd tests 2>/dev/null && cd ..
p forward tests/test_forward.py & p lengths tests/test_lengths.py & p large tests/test_masks.py tests/test_large.py & p compile tests/test_compile.py &
p transforms tests/test_transforms.py tests/test_backward_transforms.py & p bwshapes tests/test_backward.py -k "shapes" & p bw tests/test_backward.py -k "not shapes" &
p rest tests --ignore tests/host --ignore tests/test_lengths.py --ignore tests/test_forward.py --ignore tests/test_masks.py --ignore tests/test_large.py --ignore tests/test_compile.py --ignore tests/test_transforms.py --ignore tests/test_backward_transforms.py --ignore tests/test_backward.py &
wait
tar czf $OUT/tests.tgz -C /tmp $(cd /tmp; ls *.txt)
for f in /tmp/*.txt; do grep -hE "^(FAILED|ERROR)" $f | cut -c1-180 | head -12; done
