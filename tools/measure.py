"""Runs a compiler and adds a line with its processor seconds and peak memory to what it says.

setup.py gives this to ccache as CCACHE_PREFIX, so the line is kept with the object and repeated on a hit.
"""

import resource
import subprocess
import sys

status = subprocess.run(sys.argv[1:]).returncode
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
seconds = usage.ru_utime + usage.ru_stime
megabytes = usage.ru_maxrss / 1024  # of the largest process below
print(f"flash_cute measure: {seconds:.1f} seconds, {megabytes:.0f} MB", file=sys.stderr)
sys.exit(status)
