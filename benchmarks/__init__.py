"""Programs that measure; `python -m benchmarks` runs them all and writes RESULTS.md."""

import os

# As the console command does, before torch is imported, and for all contenders alike: threads that do not
# spin while they wait, and large pages for large tensors.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# Kernels chosen by hand make the products of NumPy and FAISS slow; they read these when they are imported.
REMOVED = [name for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE") if os.environ.pop(name, None)]
