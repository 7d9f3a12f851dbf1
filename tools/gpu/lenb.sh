# checks, then lengths of the new build and of the old one, then host time
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
timeout 100 python build/gpu/len_check.py 2>&1 | tail -12
B="benchmarks.attention --regime burst --seconds 0.15 --peers flash --head-dims 64,128 --families sm90 --lengths equal:512 --lengths lognormal:512 --lengths outlier:32768:256:64 --lengths uniform:1:4096"
timeout 120 python -m $B --name new --output /tmp/new > /tmp/new.log 2>&1; tail -3 /tmp/new.log
(cd build/gpu/old; PYTHONPATH=$PWD timeout 120 python -m $B --name old --output /tmp/old > /tmp/old.log 2>&1; tail -3 /tmp/old.log)
timeout 60 python build/gpu/host.py; (cd build/gpu/old; PYTHONPATH=$PWD timeout 60 python ../host.py)
cp -r /tmp/new /tmp/old /tmp/*.log $OUT/ 2>/dev/null
