"""`eval.py FILE:NAME check`: what is wrong with an attention, one property a row."""

import contextlib
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from vit.attention_check.properties import properties
from vit.attention_check.trial import place_of
from vit.attention_check.watch import B, D, N, Row, trial_heads
from vit.commands.config import CheckConfig
from vit.console import printable, say, shorten
from vit.files import require_file, write_json
from vit.model.arguments import Attention, with_all_arguments
from vit.model.constructors import is_whole
from vit.model.variants import attention_of, load_attention
from vit.model.whole_attention import build_attention
from vit.reporting.loading import require_replaceable
from vit.seeding import generator
from vit.settings import parse


def run(name: str, options: CheckConfig) -> None:
    """Check an attention and print a row for each property.

    Raises:
        ValueError: There is no such attention.
        SystemExit: With code 1, if a property fails that a Vision Transformer needs.
    """
    load_attention(name)
    if options.json:
        target = Path(options.json)
        require_replaceable(_is_own(target), [target], "is not of this command", "json")
    rows = check(attention_of(name))
    say(f"{printable(name)}, tried with {B} images of {N} tokens of width {D}\n")
    say("\n".join(map(str, rows)))
    if options.json:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_json(target, [asdict(row) for row in rows])
    if any(row.result == "failed" for row in rows):
        raise SystemExit(1)


def _is_own(path: Path) -> bool:
    """Tell whether a file has the rows of an earlier call."""
    with contextlib.suppress(OSError, ValueError):
        return bool(parse(list[Row], require_file(path).read_bytes(), path))
    return False


@torch.inference_mode(False)
def check(attention: Attention, with_cost: bool = True) -> list[Row]:
    """Check an attention: a function or a class of a head, or a whole module's class.

    Returns:
        A row for each property; with_cost also time and memory. `str(row)` is what the command
        shows.
    """
    attention = with_all_arguments(attention)
    rows: list[Row] = []
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # only the CPU's
            rows.extend(properties(attention))
            rows.extend([cost(attention)] if with_cost else [])
    except Exception as error:  # whatever their code raises
        reason = f"{type(error).__name__}: {shorten(error, 300)} ({place_of(error, attention)})"
        if not is_whole(attention):
            reason += "; called with query, key, value, mask and dropout (a module), it must "
            reason += "return the output and the attention weights"
        reason += f"; tried with {N} tokens of width {D}"
        rows.append(Row("can be called", "failed", "", reason))
    return rows


def cost(attention: Attention) -> Row:
    """Compare time and memory of a training step with ours, for 64 images of 65 tokens."""
    what = "time and memory of a training step"
    heads, kinds = trial_heads(attention), (attention, None)
    tokens = torch.randn(64, 65, 192, generator=generator(3, "check"), requires_grad=True)
    try:
        modules = [build_attention(kind, 192, heads, grid=(5, 13)) for kind in kinds]
        sizes = [_saved_bytes(module, tokens) for module in modules]
    except Exception as error:  # whatever their code raises
        advice = f"fails with 65 tokens of width 192: {shorten(error, 200)}"
        return Row(what, "unknown", "", advice)
    ratios = []
    for _ in range(3):
        seconds = []
        for module in modules:
            begin = time.perf_counter()
            module(tokens).sum().backward()
            seconds.append(time.perf_counter() - begin)
        ratios.append(seconds[0] / seconds[1])
    number = f"{statistics.median(ratios):.1f} and {sizes[0] / sizes[1]:.1f} times ours"
    return Row(what, "passed", number)


def _saved_bytes(module: nn.Module, tokens: Tensor) -> int:
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(tokens)
    return sum(sizes.values())
