"""Keys what a model draws while it is trained: dropout, noise, whatever torch function draws it.

Modules of the dropout family, and recurrent ones with dropout between their layers, get a forward of their own, which
costs nothing elsewhere. All other random functions are met by a `TorchFunctionMode`. That costs a microsecond or two on
every call of torch, so it is on only inside the modules that were seen to call one: the first training pass looks
everywhere, and so does a pass after one that moved torch's own generator behind our back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from verbund.errors import TaskError
from verbund.randomness import functions
from verbund.randomness.forward_pass import OUTSIDE, Pass
from verbund.randomness.keyed import KeyedDropout, KeyedRecurrent, Watched, hide_from_compiler
from verbund.randomness.source import Fill, Shape

_OUT = 'Put the batch first, or set train.randomness = "worker" to draw from torch\'s own generator'
# Draws whose layout is remembered, to notice one that changes; a loop without end must not fill the memory.
_SITES = 4096
# Passes between two searches that found nothing double, up to this.
_LONGEST_PAUSE = 1 << 12


class SampleRandomness:
    """Every number depends on (seed, step, sample id, module name, n-th use in that module, element) alone.

    Dimension 0 of what is drawn must be the batch, or a multiple of it with each sample's rows together; in models
    with modules that say `batch_first=False`, dimension 1 of three. Dropout without a batch dimension is refused; any
    other draw without one is a draw for the whole global batch, the same on all workers. Where torch draws with an
    explicit `generator=`, it is left alone.

    A draw such as `torch.rand(8)` that is meant for the whole batch looks like one row per sample to a batch of 1, 2, 4
    or 8 samples. One whose layout changes between two passes is refused.

    Args:
        model: its dropout modules get a keyed forward; classes, names and states stay as they are.
        seed: of the job.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._model = model
        self.current: Pass | None = None
        """The one under way."""
        self.mode = _Mode(self)
        """Meets random functions where it is on."""
        self._active = _Active(self)
        self._modules = dict(model.named_modules())
        self._time_major = any(getattr(module, "batch_first", True) is False for module in model.modules())
        self._layouts: dict[tuple[str, int], tuple[bool, int, int]] = {}
        self._watched: dict[str, Watched] = {}
        self._drawing: set[str] = set()
        self._searched = False
        self._suspicious = False
        self._passes = 0
        self._pause = 1
        self._next_search = 0
        self._shapes: dict[tuple[str, int], torch.Size] | None = None
        self._cuts: dict[tuple[str, int], tuple[int, int, int, int]] = {}
        for name, module in model.named_modules():
            if isinstance(module, _DropoutNd) and type(module).__module__ == _DropoutNd.__module__:
                KeyedDropout(self, name, module).install()
            elif isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1:
                KeyedRecurrent(self, name, module).install()

    def active(self, step: int, ids: Tensor) -> AbstractContextManager[None]:
        """Within the block the forward pass of the samples `ids` (int64 [B]) draws keyed numbers.

        One block at a time; how often a module drew is counted from its start.
        """
        self._active.step, self._active.ids = step, ids
        return self._active

    def context_fn(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For activation checkpointing: the repetition of a forward pass draws what the first one drew."""
        if self.current is None:
            return nullcontext(), nullcontext()
        return nullcontext(), _Again(self, self.current.copy())

    def report(self) -> str:
        return "sample"

    def probe(self, run: Callable[[], Any]) -> dict[tuple[str, int], torch.Size]:
        """Runs a training pass on the meta device; the shapes of what it draws, by module and n-th use there."""
        shapes: dict[tuple[str, int], torch.Size] = {}
        self._shapes = shapes
        try:
            with self.active(0, torch.zeros(1, dtype=torch.int64)):
                run()
        finally:
            self._shapes = None
        return shapes

    def cut(self, draws: dict[tuple[str, int], tuple[int, int, int, int]]) -> None:
        """From now on some draws are shares of larger ones.

        Args:
            draws: by module and n-th use there: the dimension, where the share begins, its length, and the length of
                the whole.
        """
        self._cuts = draws

    def uses(self) -> dict[str, int]:
        """How often each module drew in this pass so far."""
        return dict(self.current.uses) if self.current is not None else {}

    def skip(self, uses: dict[str, int]) -> None:
        """Goes on as if modules had drawn so many times more."""
        if self.current is not None:
            for name, count in uses.items():
                self.current.uses[name] = self.current.uses.get(name, 0) + count

    # -- passes --------------------------------------------------------------------------------------------------

    def _begin(self, step: int, ids: Tensor) -> None:
        current = self.current = Pass(self._seed, step, ids)
        if not self._model.training:
            return
        current.training = True
        if not self._searched:
            hide_from_compiler()
        if not self._searched or (self._suspicious and self._passes >= self._next_search):
            current.searching = True
            self._watch(set(self._modules))
        if current.searching or OUTSIDE in self._drawing:
            current.moded = True
            self.mode.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, state: Pass, completed: bool, moved: bool) -> None:
        self.current = None
        if state.moded:
            self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if not completed or not state.training:
            return
        self._passes += 1
        if state.searching:
            self._settle(state)
        elif moved and not state.moded:
            self._suspicious = True

    def _settle(self, state: Pass) -> None:
        """After a search: from now on the mode is on in the modules that drew, and what is below them has its name."""
        found = {name for name in self.mode.met if name not in self._drawing}
        late = found and self._searched
        self._suspicious = False
        if found:
            self._pause = 1
        elif self._searched:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._next_search = self._passes + self._pause
        self._searched = True
        self._drawing |= found
        everywhere = OUTSIDE in self._drawing
        self._watch({n for n in self._modules if everywhere or any(_within(n, top) for top in self._drawing)})
        if late:
            names = ", ".join(f"`{name}`" for name in sorted(found))
            warnings.warn(
                f"{names} drew random numbers in step {state.step} but not in the first: what was drawn there in "
                "between was not keyed by the sample",
                stacklevel=4,
            )

    def _watch(self, names: set[str]) -> None:
        for name in list(self._watched):
            if name not in names:
                self._watched.pop(name).remove()
        for name in names - self._watched.keys():
            watched = self._watched[name] = Watched(self, name, self._modules[name])
            watched.install()

    # -- draws ---------------------------------------------------------------------------------------------------

    def draw(
        self,
        shape: Shape,
        device: torch.device,
        what: str,
        fill: Fill,
        *,
        batch: bool,
        dimension: int | None = None,
        name: str | None = None,
    ) -> Tensor:
        """Numbers for the next use in a module.

        Args:
            shape: of what is drawn.
            device: where.
            what: the function, for messages.
            fill: makes [R, count] numbers from row keys.
            batch: whether there must be a batch dimension.
            dimension: the one that is the batch; None finds out.
            name: of the module; None is the one being called.

        Raises:
            TaskError: if there is no batch dimension where one must be, or if a draw has one now and then.
        """
        current = self.current
        assert current is not None
        if name is None:
            name = current.name
        use = current.next_use(name)
        if self._shapes is not None:
            self._shapes[name, use] = torch.Size(shape)
            return fill(current.shared_key(name, use, device), _product(shape)).view(shape)
        if (cut := self._cuts.get((name, use))) is not None and shape[cut[0]] == cut[2]:
            along, start, length, whole = cut
            full = (*shape[:along], whole, *shape[along + 1 :])
            return self._keyed(name, use, current, full, what, fill, batch, dimension, device).narrow(
                along, start, length
            )
        return self._keyed(name, use, current, shape, what, fill, batch, dimension, device)

    def _keyed(
        self,
        name: str,
        use: int,
        current: Pass,
        shape: Shape,
        what: str,
        fill: Fill,
        batch: bool,
        dimension: int | None,
        device: torch.device,
    ) -> Tensor:
        size = len(current.ids)
        if dimension is None:
            dimension = 1 if self._time_major and len(shape) == 3 and shape[1] == size else 0
        per_sample = len(shape) > dimension and shape[dimension] > 0 and size > 0 and shape[dimension] % size == 0
        if batch and not per_sample:
            raise TaskError(
                f"`{what}` in module `{name}` has shape {list(shape)} for a batch of {size} samples: dimension "
                f"{dimension} is not the batch",
                where="train.randomness",
                fix=_OUT,
            )
        if not batch and shape:
            per_sample = self._layout(name, use, what, shape, per_sample, size)
        if not per_sample:
            return fill(current.shared_key(name, use, device), _product(shape)).view(shape)
        keys = current.sample_keys(name, use, device)
        if dimension == 0:
            return fill(keys, _product(shape) // size).view(shape)
        turned = (shape[1], shape[0], *shape[2:])
        return fill(keys, _product(shape) // size).view(turned).transpose(0, 1)

    def _layout(self, name: str, use: int, what: str, shape: Shape, per_sample: bool, size: int) -> bool:
        """Whether a draw that need not have a batch dimension has one, as it had before."""
        before = self._layouts.get((name, use))
        if before is not None and before[2] != size:
            was_per_sample, rows, other = before
            # One row fits a batch of one either way: what larger batches showed decides.
            if size == 1 and not was_per_sample:
                return False
            same_rows = per_sample and rows == shape[0]
            if was_per_sample != per_sample or same_rows:
                raise TaskError(
                    f"`{what}` in module `{name}` draws {list(shape)} for {size} samples and drew {rows} rows for "
                    f"{other}: it is neither one draw per sample nor one for the whole batch",
                    where="train.randomness",
                    fix="Draw a multiple of x.shape[0] rows for numbers per sample, or torch.rand(()) for one that all "
                    'share, or set train.randomness = "worker"',
                )
        if len(self._layouts) < _SITES:
            self._layouts[name, use] = (per_sample, shape[0], size)
        return per_sample

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function whose inner random functions are to be met by the mode."""
        with self.mode:
            return function(*args, **kwargs)


def _within(name: str, top: str) -> bool:
    return not top or name == top or name.startswith(f"{top}.")


def _product(shape: Shape) -> int:
    product = 1
    for length in shape:
        product *= length
    return product


class _Active:
    """One pass. Reused, and no generator, as it is entered for every micro-batch."""

    __slots__ = ("_randomness", "_state", "ids", "step")

    def __init__(self, randomness: SampleRandomness) -> None:
        self._randomness = randomness
        self.step = 0
        self.ids = torch.empty(0, dtype=torch.int64)
        self._state: Tensor | None = None

    def __enter__(self) -> None:
        self._state = torch.default_generator.get_state()
        self._randomness._begin(self.step, self.ids)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        randomness = self._randomness
        state = randomness.current
        assert state is not None
        assert self._state is not None
        before, after = self._state.numpy(), torch.default_generator.get_state().numpy()
        randomness._end(state, kind is None, before.tobytes() != after.tobytes())


class _Again:
    """The repetition of a part of a pass, in the backward pass."""

    def __init__(self, randomness: SampleRandomness, state: Pass) -> None:
        self._randomness = randomness
        self._state = state
        self._mode: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> None:
        self._former, self._randomness.current = self._randomness.current, self._state.copy()
        # The pass may repeat itself inside its own block, where the mode is on already.
        on = self._former is not None and self._former.moded
        self._mode = self._randomness.mode if self._state.moded and not on else nullcontext()
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._randomness.current = self._former


class _Mode(TorchFunctionMode):
    """Replaces random functions by keyed ones, and remembers the modules that called one."""

    def __init__(self, randomness: SampleRandomness) -> None:
        super().__init__()
        self._randomness = randomness
        self.met: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        current = self._randomness.current
        replacement = functions.REPLACED.get(func)
        if replacement is None and func not in functions.REFUSED:
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None or current is None:
            return func(*args, **kwargs)
        if replacement is None:
            raise TaskError(
                f"`{functions.REFUSED[func]}` in module `{current.name}` cannot be keyed by the sample",
                where="train.randomness",
                fix='Draw with torch.rand, randn, randint or bernoulli, or set train.randomness = "worker" to draw '
                "from torch's own generator",
            )
        self.met.add(current.name)
        return replacement(self._randomness, func, args, kwargs)
