"""Images: decoded and resized when they are read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.errors import DataError

Size = tuple[int, int] | None
_GREY = ("1", "L", "I", "I;16", "F")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("pillow is not installed", where="data", fix="pip install 'verbund[images]'") from None
    return Image


def common_shape(files: Sequence[Path], size: Size, shape: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The shape [C, H, W] that all images are read in; only their headers are read here.

    Args:
        files: at least one.
        size: height and width that they are resized to; None: they must all have the same.
        shape: what they must come to, if that is known.

    Raises:
        DataError: naming the first file that is no image, or of another size than the others or the training set's.
    """
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        headers = list(pool.map(_header, files))
    grey = shape[0] == 1 if shape is not None else all(mode in _GREY for _, mode in headers)
    if size is None:
        first = (shape[1], shape[2]) if shape is not None else headers[0][0]
        for path, (here, _) in zip(files, headers, strict=True):
            if here != first:
                others = "others" if shape is None else "those of the training set"
                raise DataError(
                    f"is {here[0]} × {here[1]} pixels, {others} are {first[0]} × {first[1]}",
                    where=str(path),
                    fix="Set `data.image_size` to give all images one size"
                    if shape is None
                    else "Resize it, or train with `data.image_size`, to which all images are resized",
                )
        size = first
    return (1 if grey else 3, *size)


def _header(path: Path) -> tuple[tuple[int, int], str]:
    """Height and width, and mode."""
    pillow = _pillow()
    try:
        with pillow.open(path) as image:
            return (image.size[1], image.size[0]), image.mode
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise DataError(f"is no readable image: {error}", where=str(path)) from None


def decode(path: Path, size: Size, shape: tuple[int, ...] | None = None) -> NDArray[np.uint8]:
    """One image as uint8 [C, H, W]; C is 1 for greyscale, else 3.

    Args:
        path: the file.
        size: height and width to resize to; None keeps them.
        shape: what it must come to; its first entry decides between grey and colour.

    Raises:
        DataError: if it is damaged, or of another size than the others.
    """
    pillow = _pillow()
    try:
        with pillow.open(path) as image:
            grey = shape[0] == 1 if shape else image.mode in _GREY
            image = image.convert("L" if grey else "RGB")
            if size is not None and image.size != (size[1], size[0]):
                image = image.resize((size[1], size[0]), pillow.Resampling.BILINEAR)
            pixels = np.asarray(image, np.uint8)
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise DataError(f"is no readable image: {error}", where=str(path)) from None
    result = pixels[None] if grey else np.ascontiguousarray(pixels.transpose(2, 0, 1))
    if shape is not None and result.shape != shape:
        raise DataError(
            f"has the shape {list(result.shape)}, the first image has {list(shape)}",
            where=str(path),
            fix="Set `data.image_size` to give all images one size",
        )
    return result
