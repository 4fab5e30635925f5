"""Limits of the GPUs and sizes of the kernels' thread blocks (CTAs), for all launch plans."""

LANES = 32  # threads of a warp
# Threads of a warpgroup. A CTA has one warpgroup unless its launch plan asks for more.
WARPGROUP = 128
WARPS = WARPGROUP // LANES  # warps of a warpgroup
INT32_LIMIT = 2**31  # bulk copies number elements and lines in int32
ACCESS_BYTES = 16  # the most bytes that a thread loads at once; bulk copies also start at multiples of it

# The keys are major compute capabilities: 9 is Hopper, 10 and 12 are Blackwell.
SMEM_BYTES = {9: 227 * 1024, 10: 227 * 1024, 12: 99 * 1024}  # shared memory that a CTA may use
MAX_CLUSTER = {9: 16, 10: 16, 12: 8}  # the most CTAs of a cluster; sizes above 8 are not portable
FULL_CLUSTERS = 7  # clusters of 16 CTAs that an H100 runs at once, each CTA alone on its multiprocessor
RESERVED_SMEM_BYTES = 4 * 1024  # shared memory reserved for barriers and Mosaic's reductions
SMEM_ALIGNMENT = 1024  # bytes; Mosaic rounds the size of an array up to a multiple
SYSTEM_SMEM_BYTES = 1024  # shared memory of each CTA that CUDA reserves


def smem_of_each(capability: tuple[int, int], ctas: int) -> int:
    """Returns the bytes of shared memory of each CTA if `ctas` of them share a multiprocessor."""
    return (SMEM_BYTES[capability[0]] + SYSTEM_SMEM_BYTES) // ctas - SYSTEM_SMEM_BYTES
