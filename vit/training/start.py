"""Starting a run: its checks, device, processes and signals, and the checkpoint to resume from.

Before data is read, the model is built on torch's "meta" device, where tensors have no values and
take no time.
"""

import contextlib
import dataclasses
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from vit.attention_check.trial import check_attention
from vit.classifier import Classifier, build_model
from vit.config import OPTIMIZERS, Config
from vit.console import is_out_of_memory, note, note_once, shorten, sides
from vit.data.layout import find_parts
from vit.data.preprocess import Preprocess
from vit.distributed.world import (
    Diverged,
    Stopped,
    StopRequest,
    World,
    join_world,
    stop_on_signals,
    under_torchrun,
)
from vit.hardware import (
    choose_device,
    choose_precision,
    cores_to_use,
    free_memory,
    keep_freed_memory,
)
from vit.model.attention_model import require_attention, size_unit
from vit.model.embed import image_conv
from vit.model.timm_model import timm_name
from vit.model.variants import attention_code, is_edited
from vit.pretrained.adapt import Pretrained, with_statistics
from vit.run.checkpoint import Checkpoint, checkpoint_paths, read_step, step_of
from vit.run.folder import MODEL_FILE, check_run, lock_run, unfinished_config
from vit.settings import check
from vit.training.schedule import scaled_size

CLASSES = tuple("0123456789")  # any names will do
FEWEST_IMAGES = 32  # of a batch for each process; with fewer, a step is mostly overhead
PROCESS_MEMORY = 6 * 10**8  # bytes that a process with a small model and CIFAR-10 takes


@dataclass(frozen=True)
class Run:
    """What training needs to know: the config, the hardware, and where to resume from."""

    config: Config
    preprocess: Preprocess
    device: torch.device
    precision: torch.dtype = torch.float32  # of matrix products; or torch.bfloat16
    world: World = World()  # noqa: RUF009
    stop: StopRequest = field(default_factory=StopRequest)
    checkpoint: Checkpoint | None = None  # the state to resume from

    def starting_from(self, checkpoint: Checkpoint | None, source: Pretrained | None) -> "Run":
        """Begin with a checkpoint or pretrained weights, whose images were normalized alike."""
        before = source if checkpoint is None else checkpoint.preprocess
        preprocess = with_statistics(self.preprocess, before)
        return dataclasses.replace(self, preprocess=preprocess, checkpoint=checkpoint)

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.config.out)

    def environment(self) -> dict[str, Any]:
        """Return what must not change when the run is resumed, besides its config."""
        environment = {
            "attention_code": attention_code(self.config.model),
            "processes": self.world.size,
            "device": self.device.type,
            "precision": str(self.precision),
        }
        if self.device.type == "cpu":  # where sums depend on their number
            environment["threads"] = torch.get_num_threads()
        return environment


@contextlib.contextmanager
def start_run(
    config: Config, source: Pretrained | None, overwrite: bool, allow_changes: bool
) -> Iterator[Run]:
    """Check the config, connect the processes, lock the folder, and decide whether to resume.

    Nothing is deleted yet. Signals, divergence and a lack of memory end the run with a message.
    """
    check_config(config)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it
    if config.deterministic or torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(config.deterministic)  # imports torch's compiler
    device = choose_device(config.train.device)
    precision = choose_precision(config.train.precision, device)
    if device.type == "cpu":
        keep_freed_memory()
    preprocess, checkpoint = Preprocess.from_config(config.data), None
    with (
        join_world(device, config.train.timeout_minutes) as world,
        # Not earlier: while the process waits for others, Python cannot run a signal handler.
        stop_on_signals() as stop,
        contextlib.ExitStack() as stack,
    ):
        run = Run(config, preprocess, device, precision, world, stop)
        stack.enter_context(explained(run, overwrite))
        with world.main_first():
            check_processes(config, world.size)
            if world.main:
                stack.enter_context(lock_run(run.folder))
                checkpoint = check_run(run.config, overwrite, run.environment(), allow_changes)
        step = world.agree(checkpoint and checkpoint.step)
        if step is not None and not world.main:  # each reads it, because an exchange takes copies
            checkpoint = read_step(run.folder, step)
        yield run.starting_from(checkpoint, source)


@contextlib.contextmanager
def explained(run: Run, overwrite: bool) -> Iterator[None]:
    """Turn signals and divergence into exit codes, and a lack of memory into one line."""
    replaced = _checkpoints(run) if overwrite else set()
    try:
        yield
    except Stopped:
        advice = "to start over; nothing was saved"
        if saved := _checkpoints(run) - replaced:
            flags, (step, _) = "without --overwrite " if overwrite else "", max(saved)
            advice = f"{flags}to resume after step {step:,}"
        advice = f"rerun the command {advice}"
        if saved and (run.folder / MODEL_FILE).exists():
            advice = "the run had finished"
        stop = signal.Signals(run.stop.signal)
        note(f"stopped by {stop.name}: {advice}")
        raise SystemExit(128 + stop) from None
    except Diverged as error:  # in all processes, with the same numbers
        note(f"error: {error}")
        raise SystemExit(3) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        train = run.config.train
        raise ValueError(
            f"train.batch_size: out of memory with {train.batch_size} images per step "
            f"and train.accumulate={train.accumulate}; lower --train.batch_size, or "
            "raise --train.accumulate to compute each batch in smaller parts; --data.memory_gb 0 "
            "leaves images in their files, and --track.probes 0 logs no attention"
        ) from None


def _checkpoints(run: Run) -> set[tuple[int, int]]:
    """Return the steps of the checkpoints in the folder of a run, and when they were written."""
    paths = checkpoint_paths(run.folder)
    return {(step_of(path), path.lstat().st_mtime_ns) for path in paths}


def check_config(config: Config) -> None:
    """Check what needs neither data nor run folder.

    Raises:
        ValueError: The run is inside the data, or the model cannot be built for the images.
    """
    out, root = (Path(os.path.realpath(path)) for path in (config.out, config.data.root))
    is_inside = config.data.name == "folder" and out.is_relative_to(root)
    if is_inside and any(out.is_relative_to(part) for part in find_parts(root)):
        place = f"data.root={config.data.root}, where every folder is a class"
        raise ValueError(f"out: {config.out} is inside {place}; choose another --out")
    if config.train.freeze == "backbone" and config.model.pretrained is None:
        note_once("train.freeze: the backbone is random without --model.pretrained, and stays so")
    # Values that a config of an earlier version may have.
    whole = config.train.small_share != 1
    check(config.train, "small_share", whole, "less than 1: the last steps need the full size")
    for name in ("mixup", "cutmix"):
        alpha = getattr(config.augment, name)
        check(config.augment, name, alpha == 0 or alpha >= 0.01, "0, or at least 0.01")
    preprocess, meta = Preprocess.from_config(config.data), torch.device("meta")
    try:
        with meta:
            dot = dataclasses.replace(config.model, attention="dot")
            model = build_model(dot, preprocess, len(CLASSES))
    except ValueError as error:
        raise ValueError(f"model.{str(error).removeprefix('model.')}") from None
    untrained = Classifier(model.eval(), preprocess, CLASSES, meta, torch.float32)
    if config.model.name == "vit":
        _check_vit(config, untrained)
    else:
        _check_timm(config, untrained)


def _check_vit(config: Config, untrained: Classifier) -> None:
    """Try the attention of our VisionTransformer on the tokens of a run's images."""
    model, train = config.model, config.train
    if not is_edited(model.attention):
        return
    built, full_size = require_attention(untrained.model), untrained.preprocess.image_size
    precision = choose_precision(train.precision, choose_device(train.device))
    sizes = {full_size: ""}
    if train.small_share:
        small = scaled_size(full_size, train.small_scale, built.patch_embed.patch_size)
        sizes.setdefault(small, "; --train.small_share 0 trains with no fewer")
    for size, hint in sizes.items():
        grid, full = (built.patch_embed.grid(*one) for one in (size, full_size))
        check_attention(model, grid, built.num_prefix_tokens, hint, full, precision)


def _check_timm(config: Config, untrained: Classifier) -> None:
    """Check that a timm model takes the images and the way of training."""
    name, train, model = config.model.name, config.train, untrained.model
    image_size = untrained.preprocess.image_size
    if problem := problem_with(untrained, image_size):
        made_for = getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224))[1:]
        raise ValueError(
            f"model.name: {name} does not take the images of this data set, {sides(image_size)} "
            f"pixels ({shorten(problem, 150)}); {timm_name(model)} is made for {sides(made_for)} "
            "pixels, and some models can be fitted to others with --model.timm_args, e.g. "
            "'{patch_size: 4}'"
        )
    small = scaled_size(image_size, train.small_scale, size_unit(model))
    if train.small_share and problem_with(untrained, small):
        allowed = f"which takes images of {sides(image_size)} pixels but not of {sides(small)}"
        check(train, "small_share", False, f"0 with model.name={name}, {allowed}")
    if train.whiten and image_conv(model, untrained.preprocess.channels) is None:
        allowed = "which does not begin with a convolution of the image"
        check(train, "whiten", False, f"false with model.name={name}, {allowed}")
    if OPTIMIZERS[config.optim.name].muon and not untrained.has_maps:
        allowed = "muon is for the encoder blocks of Vision Transformers"
        check(config.optim, "name", False, f"adamw with model.name={name}; {allowed}")
    if train.checkpoint_blocks:
        try:
            cast(Any, model).set_grad_checkpointing()
        except (AssertionError, AttributeError, NotImplementedError):  # what timm's models raise
            allowed = f"false with model.name={name}, for which timm does not offer it"
            check(train, "checkpoint_blocks", False, allowed)


def problem_with(classifier: Classifier, image_size: tuple[int, int]) -> str | None:
    """Say why a model does not classify images of a size; None if it does."""
    channels, expected = classifier.preprocess.channels, (2, len(classifier.classes))
    try:
        with torch.no_grad():
            images = torch.zeros(2, channels, *image_size, device=classifier.device)
            logits = classifier.model(images)
    except Exception as error:  # timm checks sizes in many places and ways
        return str(error) or repr(error)
    shape = getattr(logits, "shape", None)
    return None if shape == expected else f"it returns {shape or type(logits).__name__}"


def on_all_cores(config: Config, overwrite: bool) -> Config:
    """Fill in `train.processes`, see `choose_processes`, and check that they can share a batch."""
    if under_torchrun():
        return config
    stored = None if overwrite else unfinished_config(config)
    count = choose_processes(config, stored, cores_to_use())
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, processes=count))
    check_processes(config, count)
    return config


def choose_processes(config: Config, stored: Config | None, cores: int) -> int:
    """Choose the number of processes of a run.

    The configured number; else the number in the config `stored` by an unfinished run; else the
    largest one up to `cores` that divides the batch into equal parts of at least `FEWEST_IMAGES`,
    of even size if images are mixed in pairs, and fits into the memory. A run on an accelerator,
    and one that trains the head alone, have a single process.
    """
    settings = config.train
    on_cpu = choose_device(settings.device).type == "cpu"
    if settings.processes is not None:
        if settings.processes > 1 and not on_cpu:
            raise ValueError(
                f"train.processes: {settings.processes} is only for a CPU; use "
                "--train.processes null, or start a process for each GPU with "
                f"`torchrun --nproc_per_node {settings.processes} --no-python vit-train ...`"
            )
        return settings.processes
    if stored is not None and on_cpu:
        return stored.train.processes or 1  # which older versions do not name
    if settings.freeze == "backbone" or not on_cpu:
        return 1
    parts = settings.batch_size // settings.accumulate
    group = 2 if config.augment.mixes else 1  # images that one process needs together
    most, size = min(cores, parts // FEWEST_IMAGES), settings.batch_size
    counts = [n for n in range(1, most + 1) if parts % n == 0 and size // n % group == 0] or [1]
    free = free_memory()
    fitting = [n for n in counts if n * PROCESS_MEMORY <= free] or [1]
    if len(fitting) < len(counts):
        note(f"the free memory suffices for {fitting[-1]} of {counts[-1]} processes")
    return fitting[-1]


def check_processes(config: Config, processes: int) -> None:
    """Check that a run has the number of processes that it asks for, and they can share a batch.

    Raises:
        ValueError: Another number was started, or a batch cannot be divided into that many parts.
    """
    train, parts = config.train, config.train.accumulate * processes
    allowed = (
        f"null or {processes} here: train.py starts processes, a call of train from Python does "
        "not, and torchrun takes the number from its own command line"
    )
    check(train, "processes", train.processes in (None, processes), allowed)
    if train.batch_size % parts:
        raise ValueError(
            f"train.batch_size: {train.batch_size} cannot be divided among {processes} processes "
            f"with train.accumulate={train.accumulate}; it must be a multiple of {parts}"
        )
    if config.augment.mixes and processes > 1 and train.batch_size // processes % 2:
        raise ValueError(
            f"train.batch_size: {train.batch_size} is an odd number of images in each of "
            f"{processes} processes, but augment.mixup and augment.cutmix mix pairs; it must be a "
            f"multiple of {processes * math.lcm(2, train.accumulate)}"
        )
