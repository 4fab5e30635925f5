"""Implementation `mosaic_gpu`: Pallas kernels for Hopper and newer GPUs."""
def unsupported(call, capability):
    return "not yet"
