"""The fault harness; see __main__.py."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy starts threads: a fork does not copy them
