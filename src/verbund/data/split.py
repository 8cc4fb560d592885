"""The split into training and validation samples: a seeded hash of the sample id, and nothing else, decides.

The ids of neither side are listed: a bitmap with a rank directory finds the k-th id of a side, 1.5 bits a sample.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from verbund.data.hashing import key, mix_array

Ids = NDArray[np.int64]

_SALT = 0x53504C4954  # "SPLIT": keeps the split independent of other uses of the seed
_GROUP = 16  # bytes of the bitmap per entry of the directory
_STEP = 1 << 20

_BYTES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_COUNT = _BYTES.sum(axis=1).astype(np.uint8)
_SELECT = np.argsort(1 - _BYTES, axis=1, kind="stable").astype(np.int64)  # [byte, k]: place of its k-th set bit


def held_out(ids: Ids, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Which of `ids` belong to the validation set: a pure function of (seed, id), monotone in `fraction`."""
    hashes = mix_array(ids.astype(np.uint64) ^ np.uint64(key(seed, _SALT)))
    return (hashes >> np.uint64(11)) < np.uint64(round(fraction * 2**53))


class Selection:
    """The ids of one side of a split, in rising order.

    Args:
        size: samples of the whole data set.
        fraction: share that is held out for validation, in [0, 1).
        seed: of the job.
        validation: which side.
    """

    def __init__(self, size: int, fraction: float, seed: int, *, validation: bool) -> None:
        groups = -(-size // (8 * _GROUP))
        bits = np.zeros(groups * _GROUP, np.uint8)
        for start in range(0, size, _STEP):
            chosen = held_out(np.arange(start, min(start + _STEP, size)), fraction, seed)
            packed = np.packbits(chosen if validation else ~chosen, bitorder="little")
            bits[start // 8 : start // 8 + len(packed)] = packed
        self._bits = bits.reshape(groups, _GROUP)
        counts = _COUNT[self._bits].sum(axis=1, dtype=np.int64)
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    def __len__(self) -> int:
        return int(self._before[-1])

    def select(self, positions: Ids) -> Ids:
        """The ids at `positions` of this side; shape [k], each in [0, len).

        Raises:
            IndexError: if a position is outside.
        """
        if positions.size and not (positions.min() >= 0 and positions.max() < len(self)):
            raise IndexError(f"a position is outside of [0, {len(self)})")
        groups = np.searchsorted(self._before, positions, side="right") - 1
        rest = positions - self._before[groups]
        counts = np.cumsum(_COUNT[self._bits[groups]], axis=1, dtype=np.int64)
        places = (counts <= rest[:, None]).sum(axis=1)
        rows = np.arange(len(positions))
        bytes_ = self._bits[groups, places]
        rest -= counts[rows, places] - _COUNT[bytes_]
        ids: Ids = (groups * _GROUP + places) * 8 + _SELECT[bytes_, rest]
        return ids
