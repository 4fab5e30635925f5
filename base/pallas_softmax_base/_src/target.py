"""The GPU that a computation is lowered for."""

import jax

# Compute capabilities by a word of the device kind, since an abstract device has only its kind.
_CAPABILITIES = {
    "V100": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "A800": (8, 0),
    "A10": (8, 6),
    "A40": (8, 6),
    "RTX 30": (8, 6),
    "L4": (8, 9),
    "RTX 40": (8, 9),
    "B200": (10, 0),
    "B300": (10, 3),
    "RTX 50": (12, 0),
}
_HOPPER = (9, 0)


def capability() -> tuple[int, int]:
    """Returns the compute capability (major, minor) of the GPU that a computation is lowered for.

    If an abstract device is set, its kind decides; an unknown kind counts as Hopper. Otherwise the first visible GPU
    decides. Without a GPU, the result is Hopper's capability.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform == "gpu":
        return next((c for kind, c in _CAPABILITIES.items() if kind in device.device_kind), _HOPPER)
    try:
        capability = jax.devices("cuda")[0].compute_capability
    except RuntimeError:  # there is no CUDA device: this is jax.export, or a test of the lowering
        return _HOPPER
    major, minor = capability.split(".")
    return int(major), int(minor)
