"""The elements of `element_ptx` in programs of `ptx_values`: values in place of the names of registers."""

from pallas_softmax.implementations.mosaic_gpu.device.element_ptx import Elements
from pallas_softmax.implementations.mosaic_gpu.device.ptx_values import Program, Value


def keys(p: Program, kind: Elements, words: list[Value]) -> list[Value]:
    """Returns the sort key of each element of the words."""
    return _values(p, kind.keys(p, kind.bits(p, _names(words))), "s32")


def keys_of_bits(p: Program, kind: Elements, bits: Value) -> Value:
    """Returns the sort key of an element's bits, a signed number."""
    return p.value(kind.keys(p, [str(bits)])[0], "s32")


def floats(p: Program, kind: Elements, words: list[Value], marked: bool) -> list[Value]:
    """Returns each element in float32; if `marked`, -inf in place of those whose bits are all ones."""
    return _values(p, kind.floats(p, _names(words), marked), "f32")


def best(p: Program, kind: Elements, words: list[Value], floats: list[Value] | None) -> tuple[Value, Value]:
    """Returns the largest element in float32, and its sort key; see `Elements.best`."""
    value, key = kind.best(p, _names(words), _names(floats) if floats else None)
    return p.value(value, "f32"), p.value(key, "s32")


def _names(values: list[Value]) -> list[str]:
    return [str(value) for value in values]


def _values(p: Program, registers: list[str], kind: str) -> list[Value]:
    return [p.value(register, kind) for register in registers]
