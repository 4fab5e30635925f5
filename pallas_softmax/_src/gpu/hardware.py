"""Numbers of the GPUs and of the kernels' thread blocks (CTAs), on which every launch plan rests."""

LANES = 32  # threads of a warp
# Threads of a warpgroup; a CTA has one, and several where a launch plan says so.
WARPGROUP = 128
WARPS = WARPGROUP // LANES  # of a warpgroup
INT32_LIMIT = 2**31  # bulk copies number elements and lines in int32
ACCESS_BYTES = 16  # bytes that a thread loads at once at most; bulk copies start at multiples of it, too
DTYPES = ("float32", "bfloat16", "float16")  # of the arrays that the kernels read

# The keys are major compute capabilities: 9 is Hopper, 10 and 12 are Blackwell.
SMEM_BYTES = {9: 227 * 1024, 10: 227 * 1024, 12: 99 * 1024}  # shared memory that a CTA may use
MAX_CLUSTER = {9: 16, 10: 16, 12: 8}  # CTAs of a cluster at most; sizes above 8 are not portable
# Clusters of 16 CTAs, each alone on its multiprocessor, at once on an H100 (cudaOccupancyMaxActiveClusters).
FULL_CLUSTERS = 7
RESERVED_SMEM_BYTES = 4 * 1024  # shared memory kept for barriers, and for what Mosaic reduces with
SMEM_ALIGNMENT = 1024  # bytes, to multiples of which Mosaic rounds an array up
SYSTEM_SMEM_BYTES = 1024  # of each CTA that CUDA keeps


def smem_of_each(capability: tuple[int, int], ctas: int) -> int:
    """Returns the bytes of shared memory that each of so many CTAs of a multiprocessor may use."""
    return (SMEM_BYTES[capability[0]] + SYSTEM_SMEM_BYTES) // ctas - SYSTEM_SMEM_BYTES
