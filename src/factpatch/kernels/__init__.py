"""GPU kernels, written in Triton, for shapes on which torch's own kernels are slow.

Importing this package does not import Triton, which comes only with torch for GPUs; importing its modules does.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def kernels_support(x: Tensor) -> bool:
    """Returns True if our kernels can run on this tensor: it must be in half precision and on a supported GPU."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and has_kernels(x.device)


@cache
def has_kernels(device: torch.device) -> bool:
    """Returns True if our kernels compile for this GPU and run on it."""
    if find_spec("triton") is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from factpatch.kernels.norm import Norm

        one = torch.ones(16, device=device, dtype=torch.bfloat16)
        Norm.apply(one, one, one, 1e-5)
    except Exception:  # Triton may be unable to compile, for example without a C compiler; use torch's kernels then
        return False
    return True
