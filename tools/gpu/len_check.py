import sys, os
sys.path[:0] = [os.getcwd(), os.getcwd() + "/tests"]
import torch, flash_cute
from cases import *
from tolerance import assert_ragged
import inspect
dev="cuda"; n=0
for D in (64,128,256):
    for name, seqs in BATCHES.items():
        for packed in (True, False):
            for mk in ("full","causal","window_causal"):
                for heads in ((4,4),(6,2)):
                    b = make_ragged(seqs, heads, D, torch.bfloat16, dev, packed)
                    f = flash_cute.forward_varlen if packed else flash_cute.forward
                    r = f(b.q,b.k,b.v,family="sm90",**b.lengths,**MASKS[mk].options)
                    try: assert_ragged(r, b, MASKS[mk]); n+=1
                    except AssertionError as e: print("FAIL",D,name,packed,mk,heads,str(e)[:150])
print("ok",n)
