"""Programs that measure; `python -m benchmarks` runs them all and writes RESULTS.md."""

import os

# As the console command does, before torch is imported, and for all contenders alike: threads that do not
# spin while they wait, and large pages for large tensors.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
