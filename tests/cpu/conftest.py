"""Triton's kernels run in its interpreter here: whoever imports triton later finds this set."""

import os

os.environ["TRITON_INTERPRET"] = "1"
