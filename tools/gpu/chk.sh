export PYTHONPATH=$PWD
for l in $1; do timeout 100 python build/gpu/chk.py $l $2 2>&1 | tail -6 & done; wait
