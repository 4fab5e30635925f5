"""Numbers of the GPU and of the kernels' thread blocks, on which every launch plan rests."""

WARPGROUP = 128  # threads of a CTA: one warpgroup
ACCESS_BYTES = 16  # of a thread, and the alignment of bulk copies between device and shared memory
DTYPES = ("float32", "bfloat16", "float16")

# Shared memory a CTA may use, by major compute capability, in bytes.
SMEM_BYTES = {9: 227 * 1024, 10: 227 * 1024, 12: 99 * 1024}
MAX_CLUSTER = {9: 16, 10: 16, 12: 8}  # CTAs of a cluster at most; 16 is more than the portable 8
RESERVED_SMEM_BYTES = 4 * 1024  # barriers, reduction scratch
