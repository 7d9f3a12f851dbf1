#!/bin/bash
# sasshash.sh OBJDIR : prints "object hash" of each object's machine code
export PATH=/work/venv/lib/python3.11/site-packages/nvidia/cu13/bin:$PATH
for o in "$1"/*.o; do
  n=$(basename $o .o)
  case $n in forward_sm*|backward_sm*|softmax_*|kernels) ;; *) continue;; esac
  echo "$n $(/work/venv/lib/python3.11/site-packages/nvidia/cu13/bin/cuobjdump -sass $o 2>/dev/null | grep -v '^Fatbin\|^compile_size\|^host\|^identifier' | md5sum | cut -c1-16) $(/work/venv/lib/python3.11/site-packages/nvidia/cu13/bin/cuobjdump -res-usage $o 2>/dev/null | md5sum | cut -c1-8)"
done
