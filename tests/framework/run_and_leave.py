"""Runs a script like `python script`, and leaves without Python's finalization if it succeeded.

gloo's threads outlive destroy_process_group, as DTensor's caches hold the group. One that drops a tensor
while Python ends aborts the process, once in some seventy runs (pytorch/pytorch#179291).
"""

import os
import runpy
import sys
from pathlib import Path

del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
