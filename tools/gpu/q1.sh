export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
LIBS="$1" DIMS="$2" SEQ="${3:-512,2048,16384}" SECS=${4:-0.25} timeout 200 python build/gpu/bw.py time 2>&1 | grep -v Warn
nvidia-smi --query-gpu=clocks.sm,power.draw --format=csv,noheader
