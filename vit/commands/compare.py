"""`eval.py RUN compare`: accuracy, speed and attention of models on the same test images."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vit.classifier import Classifier
from vit.commands.config import CompareConfig
from vit.config import to_dict
from vit.console import printable, say, shorten
from vit.data.images import ImageSet
from vit.evaluation import evaluate, intervals
from vit.files import write_atomically, write_json
from vit.hardware import describe
from vit.intervals import average, mcnemar, student
from vit.model.attention_model import attention_model
from vit.model.config import ModelConfig
from vit.model_file import BUNDLED, SavedModel
from vit.reporting.corruptions import compare_corrupted
from vit.reporting.loading import (
    data_of,
    load_run,
    load_test,
    report_seen,
    require_own,
    require_packages,
    results_folder,
)
from vit.reporting.tables import markdown, markdown_table, with_interval
from vit.settings import changed_keys

MOST_MOVED = 8  # images listed
LONGEST_NAME = 40  # characters of a model's name, and of all names in that of a folder
CALLED = ("depth", "embed_dim", "patch_size", "attention")  # settings that always name a ViT
Maps: TypeAlias = Tensor | None
MEASURES = (
    "accuracy", "accuracy_95", "balanced_accuracy", "balanced_accuracy_95", "images_per_second"
)  # fmt: skip


def run(name: str, options: CompareConfig) -> None:
    """Compare models with the first on the test images; print a table, and write it with numbers.

    ValueError if a model or the data cannot be read, if models have different data or classes, or
    if the folder for results contains files of another kind.
    """
    if options.corruptions:
        require_packages("corruptions", ("scipy",), "evaluation")
    runs = [name, *options.others, *options.against]
    models = [load_run(run, options.device, options.precision) for run in runs]
    first = models[0]
    paths = [saved.path.resolve() for saved in models]
    if repeated := [path for path in paths if paths.count(path) > 1]:
        raise ValueError(f"compare: {repeated[0]} is given twice; name each run once")
    tests = _load_tests(models, options.data.root)
    names = [printable(saved.name).replace("\\", "_")[:LONGEST_NAME] for saved in models]
    if len({*names}) < len(names):
        names = [f"{name}_{number}" for number, name in enumerate(names, start=1)]
    folder = _own_folder(first, runs, names, options)
    folder.mkdir(parents=True, exist_ok=True)
    say("\n".join(saved.describe() for saved in models))
    rows = _measure(names, models, tests, options.batch_size)
    content = {
        "data": first.config.data.name,
        "images": len(tests[0]),
        "options": dataclasses.asdict(options),
        "hardware": f"{describe(first.device)}, {str(first.precision).removeprefix('torch.')}",
        "models": rows,
    }
    text = as_text(content)
    if options.against:
        content["over_runs"], table = _compare_groups(models, rows, 1 + len(options.others))
        text += f"\n\n{table}"
    say(f"\n{text}")
    if options.corruptions:
        pairs = dict(zip(names, zip(models, tests, strict=True), strict=True))
        results, table = compare_corrupted(pairs, folder, options.seed, options.batch_size)
        content["corruptions"] = results
        say(f"\n{table}")
        text += f"\n\n{table}"
    write_atomically(folder / "comparison.md", f"{text}\n".encode())
    write_json(folder / "comparison.json", content)
    say(f"\nwrote comparison.md and comparison.json to {printable(folder)}/")


def _own_folder(
    first: SavedModel, runs: Sequence[str], names: Sequence[str], options: CompareConfig
) -> Path:
    """Return the folder for results, which depends on all models and the data."""
    compared = [Path(path) if path else None for path in (*runs, options.data.root)]
    places = [str(path.resolve() if path and path.exists() else path) for path in compared]
    places += [str(len(options.others))] if options.against else []
    digest = hashlib.sha256("\0".join(places).encode(errors="surrogateescape")).hexdigest()[:8]
    name = f"compare_{'_'.join(names[1:])[:LONGEST_NAME]}_{digest}"  # file systems allow 255 bytes
    folder = results_folder(first, options.out, name)
    keys = {"models", "options"}
    require_own(folder, "comparison.json", keys, ["comparison.*"], "a comparison")
    return folder


def _measure(
    names: Sequence[str], models: Sequence[SavedModel], tests: Sequence[ImageSet], batch_size: int
) -> list[dict[str, Any]]:
    """Measure each model on its test images, and how it differs from the first."""
    rows: list[dict[str, Any]] = []
    first: tuple[Tensor, Maps] | None = None
    architectures = name_architectures([saved.config.model for saved in models])
    for name, architecture, saved, test in zip(names, architectures, models, tests, strict=True):
        labels = test.labels.cpu()
        result, logits = evaluate(saved, test, batch_size)
        result |= intervals(logits, labels)
        rows.append({
            "name": name, "path": str(saved.path), "architecture": architecture,
            "parameters": sum(p.numel() for p in saved.model.parameters()),
            "seed": saved.config.train.seed, "steps": saved.step, "finished": saved.finished,
            **{key: result[key] for key in MEASURES},
        })  # fmt: skip
        seen = logits.argmax(dim=1) == labels, _rollouts(saved, test, batch_size)
        if first is not None:
            rows[-1] |= differences(*first, *seen, test)
        first = first or seen
    return rows


def _compare_groups(
    models: Sequence[SavedModel], rows: Sequence[dict[str, Any]], size: int
) -> tuple[dict[str, Any], str]:
    """Compare mean accuracy over the first `size` runs, and over the others; return a table too."""
    table = [["group", "runs", "mean accuracy (95% interval over runs)"]]
    notes, groups, samples = [], [], []
    for title, part in (("first", slice(size)), ("second", slice(size, None))):
        first, *others = models[part]
        for saved in others:
            changes = changed_keys(to_dict(first.config), to_dict(saved.config))
            if more := [key for key in changes if not key.startswith(("out: ", "train.seed: "))]:
                both = f"{saved.path} differs from {first.path} in more than the seed"
                changed = "; ".join(more).replace(" -> ", " to ")  # which Markdown does not escape
                notes.append(f"{both}: {shorten(changed, 200)}")
        runs = sorted((row["seed"], row["name"], row["accuracy"]) for row in rows[part])
        seeds, names, values = zip(*runs, strict=True)
        samples.append(torch.tensor(values, dtype=torch.float64))
        groups.append({"runs": names, "seeds": seeds, **student("accuracy", samples[-1])[0]})
        mean = with_interval(groups[-1], "accuracy", ".2%")
        table.append([title, f"{len(names)}: {', '.join(names)}", mean])
    paired = groups[0]["seeds"] == seeds and len({*seeds}) == size
    difference, p = student("accuracy", *([samples[0] - samples[1]] if paired else samples))
    table.append(["first - second", "–", with_interval(difference, "accuracy", ".2%")])
    test = "paired t-test over seeds" if paired else "Welch's t-test"
    content = {"groups": groups, "difference": {**difference, "p": p, "test": test}, "notes": notes}
    result = "no test: one run, or no variation" if p is None else f"{test}: p = {p:.2g}"
    return content, "\n\n".join([markdown_table(table), *map(markdown, (result, *notes))])


def _load_tests(models: Sequence[SavedModel], root: str | None) -> list[ImageSet]:
    """Load the first model's test images for each model, once for models that take the same.

    ValueError if data or classes differ.
    """
    first, data = models[0], models[0].config.data
    for saved in models:
        own = saved.config.data
        if own.name != data.name and not (own.spec.own_files and data.spec.own_files):
            raise ValueError(
                f"compare: {saved.path} was trained on {own.name}, not on {data.name} like "
                f"{first.path}; only models of the same data set can be compared"
            )
        if {*saved.classes} != {*first.classes}:
            raise ValueError(f"compare: {saved.path} and {first.path} must have the same classes")
    loaded: dict[Any, ImageSet] = {}
    tests = []
    for saved in models:
        inputs = saved.preprocess, saved.classes, saved.fingerprint
        if inputs not in loaded:
            # The test images of an included first model serve all models.
            path = first.path if first.path.parent == BUNDLED else saved.path
            config = dataclasses.replace(saved.config, data=data)
            loaded[inputs] = load_test(dataclasses.replace(saved, config=config, path=path), root)
            if saved.fingerprint and not data_of(saved, root or data.root)[1]:
                report_seen(saved, loaded[inputs])
        tests.append(loaded[inputs])
    return tests


def _rollouts(classifier: Classifier, test: ImageSet, batch_size: int) -> Maps:
    """Return the rollout of all test images in fractions, (N, rows, columns); None without maps."""
    if (reader := attention_model(classifier.model)) is None:
        return None
    parts = test.images.split(batch_size)
    maps = (classifier.maps(part, precision=classifier.precision)[1]["rollout"] for part in parts)
    uniform = torch.cat([part.cpu() for part in maps])
    return uniform / (reader.num_prefix_tokens + uniform[0].numel())


def name_architectures(models: Sequence[ModelConfig]) -> list[str]:
    """Name each architecture, with all settings in which others of its name differ from it."""
    names = []
    for name, own in ((model.name, vars(model)) for model in models):
        others = [vars(other) for other in models if other.name == name]
        differing = {key for key in own if any(own[key] != other[key] for other in others)}
        shown = differing.union(CALLED if name == "vit" else ())
        names.append(", ".join([name, *(f"{k}={shorten(own[k])}" for k in own if k in shown)]))
    return names


def differences(
    right: Tensor, maps: Maps, right_other: Tensor, maps_other: Maps, test: ImageSet
) -> dict[str, Any]:
    """Compare two models: which images they classify correctly, (N,) bool, and their rollout.

    Returns:
        only_right, the numbers of images that only the first and only the other classifies
        correctly; mcnemar_p, see `vit.intervals.mcnemar`; and if both have maps, moved_attention,
        the mean fraction of attention, 0 to 1, on other patches of the finer grid, or moved between
        patches and other tokens; its interval moved_attention_95; and most_moved, the images where
        it is largest.
    """
    only = [int((right & ~right_other).sum()), int((right_other & ~right).sum())]
    result = {"only_right": only, "mcnemar_p": mcnemar(*only)}
    if maps is None or maps_other is None:
        return result
    rows, columns = map(max, maps.shape[1:], maps_other.shape[1:])
    more = _divide(maps, rows, columns) - _divide(maps_other, rows, columns)
    moved = (more.abs().sum(dim=(1, 2)) + more.sum(dim=(1, 2)).abs()) / 2
    most = moved.argsort(descending=True)[:MOST_MOVED].tolist()
    listed = [{**test.entry(index), "moved": moved[index].item()} for index in most]
    return {**result, **average("moved_attention", moved), "most_moved": listed}


def _divide(maps: Tensor, rows: int, columns: int) -> Tensor:
    """Redistribute fractions over the patches of another grid, by area; their sum is the same."""

    def shares(to: int, count: int) -> Tensor:
        ends, own = torch.arange(to + 1)[:, None] / to, torch.arange(count + 1) / count
        common = torch.minimum(ends[1:], own[1:]) - torch.maximum(ends[:-1], own[:-1])
        return common.clamp(min=0) * count

    return shares(rows, maps.shape[1]) @ maps @ shares(columns, maps.shape[2]).T


def as_text(content: dict[str, Any]) -> str:
    """Format what comparison.json says as a table in Markdown."""
    first = content["models"][0]["name"]
    heads = ["model", "architecture", "parameters", "steps", "accuracy (95% interval)"]
    heads += ["mean recall", "images/s", "right alone", f"p against {first}"]
    rows = [[*heads, "attention elsewhere"]]
    for model in content["models"]:
        unfinished = "" if model["finished"] else " (unfinished)"
        alone_first, alone = model.get("only_right", (0, 0))
        rows.append([
            model["name"], model["architecture"], f"{model['parameters']:,}",
            f"{model['steps']:,}{unfinished}", with_interval(model, "accuracy", ".2%"),
            with_interval(model, "balanced_accuracy", ".2%"), f"{model['images_per_second']:,.0f}",
            f"{alone:,} : {alone_first:,}" if "only_right" in model else "–",
            with_interval({"mcnemar_p": None, **model}, "mcnemar_p", ".2g"),
            with_interval({"moved_attention": None, **model}, "moved_attention", ".1%"),
        ])  # fmt: skip
    return (
        f"{content['data']}: {content['images']:,} test images, {content['hardware']}\n\n"
        f"{markdown_table(rows)}\n\n"
        f"right alone: images on which only this model is right, and only {markdown(first)}; p: "
        "McNemar's exact test; attention elsewhere: fraction of rollout on other patches, or moved "
        "between patches and other tokens"
    )
