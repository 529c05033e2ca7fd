"""GPU kernels, in Triton, of what torch's own do at a fraction of the memory's speed.

Importable where Triton is, which comes with torch for GPUs. Triton launches on the thread's current device, so each
launch makes its tensors' device that for as long.
"""

from factpatch.kernels.attention import ShortAttention
from factpatch.kernels.divergence import Divergence
from factpatch.kernels.gates import GatedTokens
from factpatch.kernels.norm import Norm
from factpatch.kernels.product import edited_product

__all__ = ["Divergence", "GatedTokens", "Norm", "ShortAttention", "edited_product"]
