"""Images: decoded and resized when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.errors import DataError

Size = tuple[int, int] | None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("pillow is not installed", where="data.train", fix="pip install 'verbund[images]'") from None
    return Image


def shape_of(path: Path, size: Size) -> tuple[int, ...]:
    """The shape [C, H, W] of an image after resizing."""
    return decode(path, size).shape


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
            grey = shape[0] == 1 if shape else image.mode in ("1", "L", "I", "I;16", "F")
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
