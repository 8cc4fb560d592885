"""Tensors through a save and back, however they were cut."""

from __future__ import annotations

import json
import struct
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from verbund.checkpoint import Checkpoint, Piece, Snapshot, commit, partial_folder, snapshot, write_part
from verbund.checkpoint.box import Box
from verbund.checkpoint.manifest import DTYPES
from verbund.errors import CheckpointError

dtypes = st.sampled_from([getattr(torch, name) for name in DTYPES])
shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes: NaN, infinities, denormals and all."""
    size = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that cover a shape, cut again and again at random."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.length[axis]))
        low, high, start = list(box.length), list(box.length), list(box.offset)
        low[axis], high[axis], start[axis] = at, box.length[axis] - at, box.offset[axis] + at
        boxes += [Box(box.offset, tuple(low)), Box(tuple(start), tuple(high))]
    return draw(st.permutations(boxes))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_box_of_any_cut_is_read_back(data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, 3))
    tensors = {}
    pieces: list[list[Piece]] = [[] for _ in range(parts)]
    for index in range(data.draw(st.integers(1, 4))):
        values = random_tensor(data.draw(shapes), data.draw(dtypes), seed=data.draw(st.integers(0, 2**31)))
        kind, name = data.draw(st.sampled_from(["parameters", "optimizer", "ema"])), f"layer{index}.weight/x"
        tensors[kind, name] = values
        shape = tuple(values.shape)
        for box in data.draw(cuts(shape)):
            local = values[box.within(Box.whole(shape))]
            owner = data.draw(st.integers(0, parts - 1))
            for part in {owner, data.draw(st.integers(0, parts - 1))}:
                pieces[part].append(
                    Piece(kind, name, shape, values.dtype, box.offset, box.length, local, part == owner)
                )
    with tempfile.TemporaryDirectory() as temporary:
        folder = partial_folder(Path(temporary), 3)
        limit = data.draw(st.sampled_from([1, 100, 1 << 30]))
        # Empty boxes of one tensor may have the same place; a process holds each box once.
        unique = [list({(p.kind, p.name, p.offset, p.length): p for p in of}.values()) for of in pieces]
        records = [write_part(folder, part, unique[part], limit) for part in range(parts)]
        with Checkpoint.open(commit(Path(temporary), 3, records, {})) as checkpoint:
            assert {(kind, name) for kind, name in checkpoint.manifest.tensors} == set(tensors)
            for (kind, name), values in tensors.items():
                assert checkpoint.shape(kind, name) == tuple(values.shape)
                assert checkpoint.dtype(kind, name) == values.dtype
                assert same(checkpoint.read(kind, name), values)
                filled = torch.zeros_like(values)
                checkpoint.fill(kind, name, filled)
                assert same(filled, values)
                offset = [data.draw(st.integers(0, size)) for size in values.shape]
                length = [data.draw(st.integers(0, size - at)) for size, at in zip(values.shape, offset, strict=True)]
                expected = values[Box(tuple(offset), tuple(length)).within(Box.whole(values.shape))]
                assert same(checkpoint.read(kind, name, offset, length), expected)
                part_filled = torch.zeros(length, dtype=values.dtype)
                checkpoint.fill(kind, name, part_filled, offset)
                assert same(part_filled, expected)


def test_the_library_reads_our_files(tmp_path: Path) -> None:
    tensors = {name: random_tensor((3, 5), getattr(torch, name), seed=1) for name in DTYPES}
    tensors["scalar"] = torch.tensor(2.5, dtype=torch.float64)
    tensors["empty"] = torch.empty(0, 4, dtype=torch.bfloat16)
    tensors["strided"] = torch.arange(12.0).reshape(3, 4).T
    write_part(tmp_path, 0, [Piece.whole("buffers", name, values) for name, values in tensors.items()])
    found = load_file(tmp_path / "part-00000-0.safetensors")
    assert {key.removeprefix("buffers/") for key in found} == set(tensors)
    for name, values in tensors.items():
        assert same(found[f"buffers/{name}"], values)


def test_every_tensor_is_aligned_in_its_file(tmp_path: Path) -> None:
    pieces = [Piece.whole("buffers", name, random_tensor((3, 5), getattr(torch, name), seed=1)) for name in DTYPES]
    write_part(tmp_path, 0, pieces)
    raw = (tmp_path / "part-00000-0.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    assert size % 8 == 0
    for key, described in json.loads(raw[8 : 8 + size]).items():
        assert described["data_offsets"][0] % DTYPES[key.removeprefix("buffers/")][1] == 0


def test_a_parameter_that_wants_gradients_is_filled(tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 3)
    wanted = {name: values.detach().clone() for name, values in layer.named_parameters()}
    folder = partial_folder(tmp_path, 1)
    record = write_part(folder, 0, [Piece.whole("parameters", name, p) for name, p in layer.named_parameters()])
    path = commit(tmp_path, 1, [record], {})
    torch.nn.init.zeros_(layer.weight)
    with Checkpoint.open(path) as checkpoint:
        for name, parameter in layer.named_parameters():
            checkpoint.fill("parameters", name, parameter)
    for name, parameter in layer.named_parameters():
        assert parameter.requires_grad
        assert torch.equal(parameter.detach(), wanted[name])


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = partial_folder(tmp_path, 1)
    record = write_part(folder, 0, [Piece.whole("parameters", "w", torch.zeros(2, 3))])
    checkpoint = Checkpoint.open(commit(tmp_path, 1, [record], {}))
    with pytest.raises(CheckpointError, match=r"shape \[2, 3\], \[3, 2\] is wanted"):
        checkpoint.fill("parameters", "w", torch.zeros(3, 2))
    with pytest.raises(CheckpointError, match="dtype float32, float64 is wanted"):
        checkpoint.fill("parameters", "w", torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(CheckpointError, match="holds no parameters `v`"):
        checkpoint.read("parameters", "v")
    for offset, length in (((0, 2), (2, 2)), ((-1, 0), (1, 1)), ((0,), (2,)), ((3, 0), None)):
        with pytest.raises(CheckpointError, match="is wanted"):
            checkpoint.read("parameters", "w", offset, length)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kind": "weights"}, "no kind"),
        ({"dtype": torch.float64}, "said to be"),
        ({"length": (1, 3)}, "said to be"),
        ({"offset": (1, 0)}, "outside"),
        ({"values": torch.zeros(2, 3, dtype=torch.complex64), "dtype": torch.complex64}, "cannot be saved"),
    ],
)
def test_a_piece_whose_parts_do_not_fit_is_refused(changes: dict[str, object], text: str) -> None:
    fields: dict[str, object] = {"kind": "parameters", "name": "w", "shape": (2, 3), "dtype": torch.float32}
    fields |= {"offset": (0, 0), "length": (2, 3), "values": torch.zeros(2, 3), **changes}
    with pytest.raises(ValueError, match=text):
        Piece(**fields)  # type: ignore[arg-type]


def test_holes_doubles_and_orphans_are_not_committed(tmp_path: Path) -> None:
    w = torch.zeros(4, 2)
    upper = Piece("parameters", "w", (4, 2), w.dtype, (0, 0), (2, 2), w[:2])
    lower = Piece("parameters", "w", (4, 2), w.dtype, (2, 0), (2, 2), w[2:])
    other = Piece.whole("parameters", "v", torch.zeros(3), owner=False)
    wider = Piece("parameters", "w", (4, 3), w.dtype, (2, 0), (2, 3), torch.zeros(2, 3))
    for pieces, text in (
        ([[upper], []], "only 4 of its 8 elements"),
        ([[upper, lower], [lower]], "saved twice"),
        ([[upper, lower, other], [other]], "`v` has no owner"),
        ([[upper], [wider]], "has shape"),
    ):
        folder = partial_folder(tmp_path, 1)
        records = [write_part(folder, part, of) for part, of in enumerate(pieces)]
        with pytest.raises(CheckpointError, match=text):
            commit(tmp_path, 1, records, {})
    assert not list(tmp_path.glob("step-*"))
    with pytest.raises(ValueError, match="given twice"):
        write_part(folder, 0, [upper, upper])


class TestSnapshot:
    def pieces(self, values: torch.Tensor) -> list[Piece]:
        return [
            Piece.whole("parameters", "w", values),
            Piece.whole("parameters", "v", values[0], owner=False),
        ]

    def test_the_copy_stays_while_training_goes_on(self, tmp_path: Path) -> None:
        values = torch.arange(6.0).reshape(2, 3)
        wanted = values.clone()
        taker = Snapshot()
        copies = taker.take(self.pieces(values))
        values.add_(1)
        assert torch.equal(copies[0].values, wanted)
        assert copies[1].values.data_ptr() == values.data_ptr()  # not owned: not copied
        again = taker.take(self.pieces(values))
        assert again[0].values.data_ptr() == copies[0].values.data_ptr()  # memory is reused
        assert torch.equal(again[0].values, values)
        mixed = [Piece.whole("buffers", name, random_tensor((3,), getattr(torch, name), seed=2)) for name in DTYPES]
        for piece, copy in zip(mixed, taker.take(mixed), strict=True):
            assert same(piece.values, copy.values)

    def test_one_save_at_a_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = threading.Event()

        def slow(*arguments: object) -> dict[str, object]:
            assert gate.wait(10)
            return write_part(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(snapshot, "write_part", slow)
        values = torch.ones(2, 3)
        taker = Snapshot()
        future = taker.save(self.pieces(values), partial_folder(tmp_path, 1), 0)
        assert taker.busy
        with pytest.raises(RuntimeError):
            taker.take(self.pieces(values))
        values.zero_()
        gate.set()
        record = future.result(10)
        assert not taker.busy
        with Checkpoint.open(commit(tmp_path, 1, [{**record, "held": {}}], {})) as checkpoint:
            assert torch.equal(checkpoint.read("parameters", "w"), torch.ones(2, 3))

    def test_a_failed_write_is_the_futures(self, tmp_path: Path) -> None:
        taker = Snapshot()
        future = taker.save(self.pieces(torch.ones(2, 3)), tmp_path / "gone", 0)
        with pytest.raises(CheckpointError, match="part-00000-0"):
            future.result(10)
        assert not taker.busy
