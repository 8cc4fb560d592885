"""First values of the rows of an embedding table that are made when a row is first asked for.

Row r, column c of a table is a function of (seed, r, c) alone. It is computed with operations that every processor
rounds alike, so that a row is the same bit for bit wherever it is born, and in whatever company: logarithms and cosines
of torch and numpy are not.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verbund.randomness.hash import combine, hashed, sample_keys, text_key

# Elements at once: larger arrays are given back to the system after each operation, and cost a page fault every 4 KiB.
_CHUNK = 1 << 13
_LN_2 = 0.6931471805599453
_MANTISSA = np.int64((1 << 52) - 1)
_HALF = np.int64(1022 << 52)
# PPND7 of Wichura, "Algorithm AS 241: The Percentage Points of the Normal Distribution", Applied Statistics 37, 1988.
_CENTRAL = (
    (59.109374720, 159.29113202, 50.434271938, 3.3871327179),
    (67.187563600, 78.757757664, 17.895169469, 1.0),
)
_TAIL = ((0.17023821103, 1.3067284816, 2.7568153900, 1.4234372777), (0.12021132975, 0.73700164250, 1.0))
_FAR_TAIL = ((0.017337203997, 0.42868294337, 3.0812263860, 6.6579051150), (0.012258202635, 0.24197894225, 1.0))


def born(seed: int, rows: Tensor, width: int, scale: float) -> Tensor:
    """The first values of rows.

    Args:
        seed: of the table.
        rows: int64, in any order.
        width: of a row.
        scale: the standard deviation.

    Returns:
        Float32 [len(rows), width] in the memory of the processor, normally distributed with mean 0.
    """
    keys = sample_keys(combine(seed, text_key("rows")), rows.cpu())
    out = torch.empty((len(rows), width), dtype=torch.float32)
    values = out.numpy()
    for some, columns, words in hashed(keys, width):
        made = np.empty(words.shape, np.float32)
        flat, word = made.reshape(-1), words.numpy().reshape(-1)
        for low in range(0, len(word), _CHUNK):
            # The middles of 2^32 equal parts of (0, 1), less one half: exact.
            central = (word[low : low + _CHUNK].astype(np.float64) + 0.5) * 2.0**-32
            flat[low : low + _CHUNK] = _quantiles(central) * scale
        values[some, columns] = made
    return out


def _quantiles(q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Those of the standard normal distribution at q + 1/2; less than 6.4 from 0."""
    square = 0.180625 - q * q
    found = q * _ratio(_CENTRAL, square)
    outer = np.flatnonzero(np.abs(q) > 0.425)
    tails = q[outer]
    root = np.sqrt(-_logarithm(0.5 - np.abs(tails)))
    distance = _ratio(_TAIL, root - 1.6)
    if (far := root > 5.0).any():  # hardly ever
        distance[far] = _ratio(_FAR_TAIL, root[far] - 5.0)
    found[outer] = np.copysign(distance, tails)
    return found


def _ratio(pair: tuple[tuple[float, ...], tuple[float, ...]], x: NDArray[np.float64]) -> NDArray[np.float64]:
    over, under = (_polynomial(coefficients, x) for coefficients in pair)
    over /= under
    return over


def _polynomial(coefficients: tuple[float, ...], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Horner's scheme, the highest power first."""
    value = x * coefficients[0]
    value += coefficients[1]
    for coefficient in coefficients[2:]:
        value *= x
        value += coefficient
    return value


def _logarithm(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of positive numbers, to about 1e-9: exponent and mantissa m, and log m = 2 artanh((m − 1) / (m + 1))."""
    bits = x.view(np.int64)
    exponent = (bits >> 52) - 1022
    mantissa = ((bits & _MANTISSA) | _HALF).view(np.float64)
    t = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial(tuple(2.0 / power for power in range(15, 0, -2)), t * t)
    return exponent * _LN_2 + t * series
