"""Keys what a model draws while it is trained: dropout, noise, whatever torch function draws it.

Modules of the dropout family get a forward of their own, which costs nothing elsewhere. All other random functions are
met by a `TorchFunctionMode`. That costs a little on every call of torch, so the first training forward finds out whether
the model calls any; if not, the mode stays off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from verbund.errors import TaskError
from verbund.randomness import functions
from verbund.randomness.hash import combine, sample_keys, single_key, text_key

_OUT = "Put the batch first, or set train.randomness = \"worker\" to draw from torch's own generator"


@dataclass
class _Pass:
    """One forward pass: whose samples, and what was drawn so far."""

    key: int
    ids: Tensor
    uses: dict[str, int] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)

    def copy(self) -> _Pass:
        return _Pass(self.key, self.ids, dict(self.uses), list(self.stack))


class SampleRandomness:
    """Every number depends on (seed, step, sample id, module name, n-th use in that module, element) alone.

    Dimension 0 of what is drawn must be the batch, or a multiple of it with each sample's rows together. What has no
    such dimension is one draw for the whole global batch.

    Args:
        model: its dropout modules get a keyed forward; names and states stay as they are.
        seed: of the job.

    Raises:
        TaskError: if the model has dropout between the layers of an LSTM, GRU or RNN, which no key can reach.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._pass: _Pass | None = None
        self._names = {id(module): name for name, module in model.named_modules()}
        self._functions: bool | None = None
        self._mode = _Mode(self)
        for name, module in model.named_modules():
            if isinstance(module, _DropoutNd):
                self._key_module(name, module)
            if isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1:
                raise TaskError(
                    f"`{name}` has dropout between the layers of a {type(module).__name__}, which cannot be keyed by "
                    "the sample",
                    where="train.randomness",
                    fix='Use one layer each with nn.Dropout between them, or set train.randomness = "worker"',
                )

    @contextmanager
    def active(self, step: int, ids: Tensor) -> Iterator[None]:
        """Within the block forward passes of the samples `ids` (int64 [B]) draw keyed numbers."""
        self._pass = _Pass(combine(self._seed, step), ids)
        try:
            if self._functions is False:
                yield
            else:
                with self._watching():
                    yield
                # Some models draw only now and then; one that drew nothing in a whole training forward does not.
                self._functions = bool(self._functions or self._mode.met)
        finally:
            self._pass = None

    def context_fn(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For activation checkpointing: the repetition of a forward pass draws what the first one drew."""
        if self._pass is None:
            return nullcontext(), nullcontext()
        return nullcontext(), self._again(self._pass.copy())

    def report(self) -> str:
        return "sample"

    @contextmanager
    def _again(self, state: _Pass) -> Iterator[None]:
        former, self._pass = self._pass, state
        try:
            with self._watching() if self._functions is not False else nullcontext():
                yield
        finally:
            self._pass = former

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """The mode, and the names of the modules that are being called."""
        hooks = (
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            with self._mode:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if self._pass is not None:
            self._pass.stack.append(self._names.get(id(module), ""))

    def _leave(self, *_: Any) -> None:
        if self._pass is not None and self._pass.stack:
            self._pass.stack.pop()

    # -- keys ----------------------------------------------------------------------------------------------------

    def keys(self, shape: torch.Size | tuple[int, ...], device: torch.device, what: str, batch: bool) -> Tensor:
        """Row keys for the next draw of this shape: one row per sample, or one for all.

        Args:
            shape: of what is drawn.
            device: where.
            what: the function, for messages.
            batch: whether dimension 0 must be the batch.

        Raises:
            TaskError: if it must and is not.
        """
        current = self._pass
        assert current is not None
        name = current.stack[-1] if current.stack else ""
        return self._keys_of(current, name, shape, device, what, batch)

    def _keys_of(
        self, current: _Pass, name: str, shape: torch.Size | tuple[int, ...], device: torch.device, what: str, batch: bool
    ) -> Tensor:
        use = current.uses[name] = current.uses.get(name, -1) + 1
        key = combine(current.key, text_key(name), use)
        size = len(current.ids)
        if len(shape) > 0 and shape[0] > 0 and shape[0] % size == 0:
            return sample_keys(key, current.ids.to(device))
        if batch:
            raise TaskError(
                f"`{what}` in module `{name}` has {list(shape)} values for a batch of {size} samples: dimension 0 is not "
                "the batch",
                where="train.randomness",
                fix=_OUT,
            )
        return single_key(key, device)

    def _key_module(self, name: str, module: _DropoutNd) -> None:
        stock = module.forward

        def forward(x: Tensor) -> Tensor:
            current = self._pass
            if current is None or not module.training or module.p == 0.0:
                return stock(x)
            kind = type(module).__name__

            def keys(shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor:
                return self._keys_of(current, name, shape, device, kind, True)

            return functions.dropout_of(module, x, keys)

        module.forward = forward  # type: ignore[method-assign]


class _Mode(TorchFunctionMode):
    """Replaces random functions by keyed ones."""

    def __init__(self, randomness: SampleRandomness) -> None:
        super().__init__()
        self._randomness = randomness
        self.met = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        replacement = functions.REPLACED.get(func)
        if replacement is None:
            if func in functions.REFUSED and kwargs.get("generator") is None:
                raise TaskError(
                    f"`{functions.REFUSED[func]}` cannot be keyed by the sample", where="train.randomness", fix=_OUT
                )
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None or self._randomness._pass is None:
            return func(*args, **kwargs)
        self.met = True
        return replacement(self._randomness.keys, func, args, kwargs)


