export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
S=$(date +%s)
timeout 60 python build/gpu/sens.py 2>&1 | tail -34
echo sens $(( $(date +%s) - S ))
timeout 100 python build/gpu/cold.py
(timeout 90 python build/gpu/smstress.py 3 45 2>&1 | grep -v Warn | tail -3) & (timeout 90 python build/gpu/smstress.py 4 45 2>&1 | grep -v Warn| tail -3) & (timeout 90 python build/gpu/smstress.py 5 45 2>&1 | grep -v Warn| tail -3) & wait
echo total $(( $(date +%s) - S ))
