"""What an operation's schema tells: what it writes, whether it draws, whether its result hangs on values."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

# These replace all of what they write, and do not read it. Arguments named `out` are replaced too.
_OVERWRITING = frozenset(
    (
        *("fill_", "zero_", "copy_", "_foreach_zero_", "_foreach_copy_"),
        *("uniform_", "normal_", "random_", "exponential_", "bernoulli_", "geometric_", "cauchy_", "log_normal_"),
        "born_",  # of `verbund.tables`
    )
)
# Written, though the schema does not say so.
_UNDECLARED = dict.fromkeys(("native_batch_norm", "batch_norm_update_stats"), ("running_mean", "running_var"))
_EMPTY = frozenset(("empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided"))


@dataclass(frozen=True, slots=True)
class Signature:
    """What matters of a schema here."""

    name: str
    written: dict[str, int]
    """The arguments it changes, and their positions."""
    returned: tuple[str | None, ...]
    """For each result: the argument that it is."""
    overwrites: bool
    random: bool
    has_device: bool
    by_value: bool
    """It returns something that only the tensors' values tell."""
    shaped_by_value: bool
    """The shape of what it returns may depend on the values."""
    reshapes: bool
    """It changes the geometry of its argument in place, and no values."""
    empty: bool
    """It makes tensors without values."""
    views: bool
    """What it returns may be a view of an argument."""
    pointwise: bool
    """Each number of the result comes from one number of each argument."""
    like: bool
    """It makes a tensor like its first argument."""

    def changed(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        """The arguments that it changes; each a tensor, a list of them, or None."""
        return [
            arguments[position] if position < len(arguments) else named.get(name)
            for name, position in self.written.items()
        ]


@functools.cache
def signature(function: torch._ops.OpOverload) -> Signature:
    """The signature of an operation of the dispatcher."""
    schema, tags = function._schema, function.tags
    base = schema.name.partition("::")[2]
    undeclared = _UNDECLARED.get(base, ())
    written = {
        argument.name: position
        for position, argument in enumerate(schema.arguments)
        if argument.name in undeclared or (argument.alias_info is not None and argument.alias_info.is_write)
    }
    aliases = {
        label: argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for label in argument.alias_info.before_set
    }
    returned = tuple(
        next((aliases[label] for label in result.alias_info.before_set if label in aliases), None)
        if result.alias_info is not None
        else None
        for result in schema.returns
    )
    outs = all(argument.is_out for argument in schema.arguments if argument.name in written)
    return Signature(
        name=base,
        written=written,
        returned=returned,
        overwrites=bool(written) and (base in _OVERWRITING or outs),
        random=torch.Tag.nondeterministic_seeded in tags,
        has_device=any(argument.name == "device" for argument in schema.arguments),
        by_value=any("Tensor" not in str(result.type) for result in schema.returns),
        shaped_by_value=torch.Tag.dynamic_output_shape in tags,
        reshapes=torch.Tag.inplace_view in tags,
        empty=base in _EMPTY,
        views=any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns),
        pointwise=torch.Tag.pointwise in tags,
        like=base.endswith("_like"),
    )
