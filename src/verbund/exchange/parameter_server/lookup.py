"""Embeddings whose weight is elsewhere: they look up in the rows that their input names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from verbund.errors import InputError

WHOLE = "use an embedding that is neither sparse nor a `Table`: then each worker has it whole"
"""What helps a table that cannot be elsewhere."""
Use = Callable[[Tensor, int | None], tuple[Tensor, Tensor, int | None]]
"""From ids and the padding row to what torch's function gets: those of a small table of the rows used, and it."""


class _Remote:
    _use: Use
    _table: str

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"`{self._table}` lies on the parameter servers: a forward pass can look rows up, and no more"
            )
        return super().__getattr__(name)  # type: ignore[misc]


class _Embedding(_Remote):
    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        ids, weight, padding = self._use(input, self.padding_idx)
        return functional.embedding(ids, weight, padding)


class _Bag(_Remote):
    padding_idx: int | None
    mode: str
    include_last_offset: bool

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        ids, weight, padding = self._use(input, self.padding_idx)
        return functional.embedding_bag(
            ids,
            weight,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


def become_remote(module: nn.Embedding | nn.EmbeddingBag, table: str, use: Use) -> None:
    """Takes the weight out of a module, in place; all else that the user has given it and its class stays.

    Args:
        module: has passed `check`.
        table: the name of its tensor.
        use: see `Use`.
    """
    del module._parameters["weight"]
    kind = type(module)
    module.__class__ = type(kind.__name__, (_Bag if isinstance(module, nn.EmbeddingBag) else _Embedding, kind), {})
    module.__dict__.update(_use=use, _table=table)


def check(path: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Whether a module's table can be elsewhere.

    Raises:
        InputError: naming the module.
    """
    bag = isinstance(module, nn.EmbeddingBag)
    forward: Callable[..., Any] = type(module).forward
    fix = f"Leave it out, or {WHOLE}"
    if module.max_norm is not None:
        what = "has `max_norm`, which changes rows in a forward pass"
    elif module.scale_grad_by_freq:
        what = "has `scale_grad_by_freq`, which depends on how samples are divided"
    elif bag and module.mode == "max":
        what, fix = 'has the mode "max", which gives no sparse gradients', 'Use "sum" or "mean", or sparse=False'
    elif "weight" not in module._parameters or module.weight._backward_hooks:
        what, fix = "has a weight that is parametrised, or hooks on it", f"Take them away, or {WHOLE}"
    elif forward is not (nn.EmbeddingBag.forward if bag else nn.Embedding.forward):
        what = f"has a forward pass of its own ({type(module).__name__})"
        fix = f"Put what it does beside the lookup into a module of its own, or {WHOLE}"
    else:
        return
    raise InputError(f"`{path}` {what}: its table cannot lie on parameter servers", where="model()", fix=fix)
