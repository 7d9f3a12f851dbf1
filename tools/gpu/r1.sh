export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
nvidia-smi -L
timeout 100 python build/gpu/i11.py 2>&1 | tee $OUT/i11.txt
timeout 60 python -m benchmarks.overhead --seconds 2 --output $OUT > $OUT/overhead.txt 2>&1; grep -v graph $OUT/overhead.txt | head -60
(timeout 240 python tests/sanitize.py memcheck racecheck synccheck > $OUT/sanitize.txt 2>&1) &
timeout 280 python -m pytest tests -q -p no:cacheprovider --ignore tests/host --ignore tests/test_lengths.py --ignore tests/test_forward.py --ignore tests/test_masks.py --ignore tests/test_large.py --ignore tests/test_compile.py > $OUT/pytest.txt 2>&1
tail -15 $OUT/pytest.txt
wait; cat $OUT/sanitize.txt | tail -20
