"""Division of logits by temperatures: any finite number from 0 up, whatever its reciprocal is.

XLA turns x / T into x * (1 / T) in most programs. So this does it in all: equal calls get equal bits. On a CPU, XLA
takes subnormal numbers for 0. So a temperature T is kept as two normal numbers, T = divisor / factor, where the
reciprocal of the divisor is normal too. The factor is a power of two, so that a product with it is exact. In float32:

    T                        factor     divisor
    below 2^-100             2^100      from 2^-49 to 1, or 0
    from 2^-100 to 2^120     1          T
    above 2^120              1/4        from 2^118 to 2^126

At T = 0, a quotient is the limit: (x - m) / T is 0 where x = m, and -inf elsewhere.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Temperature(NamedTuple):
    """Temperatures of at least 0, or NaN, of shape (..., 1)."""

    factor: Any
    divisor: Any

    @staticmethod
    def of(t: jax.Array) -> "Temperature":
        is_cold, is_hot = t < 1 / _cold_factor(t), t > 2.0 ** (jnp.finfo(t.dtype).maxexp - 8)
        factor = jnp.where(is_cold, _cold_factor(t), jnp.where(is_hot, 0.25, 1.0)).astype(t.dtype)
        return Temperature(factor, _times(t, factor))

    @property
    def is_zero(self):
        """Whether each temperature is exactly 0; a comparison of T itself would take a subnormal T for 0 on a CPU."""
        return self.divisor == 0

    def divide(self, x):
        return self._limit(_times(x, self.factor))

    def distance(self, x, m):
        """Returns (x - m) / T for x <= m, and 0 where x = m at T = 0."""
        overflows = (self.factor > 1) & (jnp.abs(m) >= 1)  # x and m times the factor may be infinite
        scaled = _times(x, self.factor) - _times(m, self.factor)
        return self._limit(jnp.where(overflows, (x - m) * self.factor, scaled))

    def over(self, derivative):
        """Returns derivative / T, for T > 0; subnormal derivatives may become 0."""
        return derivative * self.factor / self.divisor

    def _limit(self, scaled):
        limit = jnp.where(scaled > 0, jnp.inf, jnp.where(scaled < 0, -jnp.inf, scaled))
        return jnp.where(self.is_zero, limit, scaled * (1 / jnp.where(self.is_zero, 1, self.divisor)))


def _cold_factor(t: jax.Array) -> float:
    return 2.0 ** -(jnp.finfo(t.dtype).minexp + 26)


def _times(x: jax.Array, factor: jax.Array) -> jax.Array:
    return jnp.where(factor > 1, times_power(x, _cold_factor(x)), x * factor)


# ---- Subnormal numbers, which XLA takes for 0 on a CPU


def is_zero(x: jax.Array) -> jax.Array:
    """Returns which elements are exactly 0.

    On the CPU, comparisons of floats take subnormal numbers for 0, and LLVM turns `bits == 0` into one. So this
    compares a number that grows with the bits.
    """
    return magnitude_bits(x).astype(x.dtype) * 0.75 + 0.25 < 0.5


def times_power(x: jax.Array, power: float) -> jax.Array:
    """Returns x times a large power of two, which is exact unless it overflows.

    The bits of a subnormal number are an integer, its multiple of the smallest subnormal number.
    """
    info, bits = jnp.finfo(x.dtype), magnitude_bits(x)
    unit = float(info.smallest_subnormal) * power
    scaled, exact = x * power, jnp.where(jnp.signbit(x), -unit, unit) * bits.astype(x.dtype)
    is_subnormal = bits < 2**info.nmant
    return scaled + lax.stop_gradient(jnp.where(is_subnormal, exact - scaled, 0))


def magnitude_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of the absolute values. On the CPU, `jnp.abs` would make 0 of subnormal numbers."""
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    return bits & jnp.iinfo(bits.dtype).max
