# t1.sh: what the fourth warp does (stop 28's variants: p1 statistics inside, p2 the same with rows of dQ by a kernel behind at d128,
# libraries: a tree with a variant applied (git apply tools/gpu/variants/stop28_NAME.diff), then vb2.sh NAME TREE "64 128"
# r1 tiles named one ahead where lengths differ, pr both): right? how fast? Start: `T=100 bash build/gpu/t1.sh`
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
for n in p1 r1 pr; do (NS=$n DIMS=64,96,128 timeout 100 python build/gpu/bw.py check > /tmp/c_$n.txt 2>&1; echo "$n: $(grep -c ^ok /tmp/c_$n.txt) ok, $(grep -c ^FAIL /tmp/c_$n.txt) wrong; $(grep -vE '^(ok|FAIL)' /tmp/c_$n.txt | tail -1 | cut -c1-120)") & done; wait
grep -h ^FAIL /tmp/c_*.txt | head -5
LIBS="p1 p2" DIMS=64,128 SEQ=512,1024,2048,16384 SECS=0.3 timeout 90 python build/gpu/bw.py time
LIBS="main p1 r1 pr" timeout 60 python build/gpu/pf.py
