"""Runs a compiler and adds a line with its seconds and peak memory to what it says.

setup.py gives this to ccache as CCACHE_PREFIX, so the line is kept with the object and repeated on a hit.
"""

import resource
import subprocess
import sys
import time

start = time.perf_counter()
status = subprocess.run(sys.argv[1:]).returncode
seconds = time.perf_counter() - start
megabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024  # of the largest process below
print(f"flash_cute measure: {seconds:.1f} seconds, {megabytes:.0f} MB", file=sys.stderr)
sys.exit(status)
