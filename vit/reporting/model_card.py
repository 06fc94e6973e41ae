"""A model as the Hugging Face Hub expects it: model file, config.json and model card."""

import dataclasses
import json
import shlex
import textwrap
from pathlib import Path
from string import Template
from typing import Any

import yaml

from vit.config import Config, to_dict
from vit.console import printable, say, sides
from vit.files import write_atomically, write_json
from vit.hub import HUB
from vit.model.config import TIMM
from vit.model.definitions import is_in_file
from vit.model_file import SavedModel, save_model, weights_digest
from vit.pretrained.sources import LOCAL
from vit.reporting.calibration import calibration_table
from vit.reporting.loading import require_replaceable
from vit.reporting.tables import markdown, metrics_table, read_report
from vit.run.folder import EVAL_FOLDER, MODEL_FILE, REPORT_FILE

LIBRARY = "vit-from-scratch"


def write_hub(saved: SavedModel, folder: Path) -> None:
    """Write a folder for `hf upload OWNER/NAME FOLDER`, without paths of this machine.

    ValueError if it exists: its model card may have been edited.
    """
    require_replaceable(False, [folder], "may have been edited")
    config = without_places(saved.config)
    content = {
        "library_name": LIBRARY,
        "config": to_dict(config),
        "preprocess": to_dict(saved.preprocess),
        "label_names": list(saved.classes),
    }
    card = model_card(saved)  # which may fail
    folder.mkdir(parents=True)
    save_model(folder / MODEL_FILE, saved, config, saved.step, saved.fingerprint)
    write_json(folder / "config.json", content)
    write_atomically(folder / "README.md", card.encode())
    arguments = shlex.join((f"OWNER/{saved.name}", str(folder)))
    say(f"wrote {printable(folder)}; upload it with: hf upload {printable(arguments)}")


def _is_public(name: str) -> bool:
    """Tell whether weights have the same name on all machines."""
    return name.startswith((TIMM, HUB)) and not name.startswith(f"{TIMM}{LOCAL}")


def without_places(config: Config) -> Config:
    """Return a config without the folders of the machine on which it was used."""
    defaults, model, optim = Config(), config.model, config.optim

    def bare(name: str | None) -> str | None:
        return name if not name or _is_public(name) else Path(name).name

    names: dict[str, Any] = {key: bare(getattr(model, key)) for key in ("pretrained", "attention")}
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, root=defaults.data.root),
        model=dataclasses.replace(model, **names),
        optim=dataclasses.replace(optim, teacher=bare(optim.teacher)),
        out=defaults.out,
    )


def model_card(saved: SavedModel) -> str:
    """Describe a model in Markdown, with the results of its report on the test images."""
    file = saved.run / EVAL_FOLDER / REPORT_FILE
    report = read_report(file) if saved.finished and file.exists() else {}
    own = (report.get("source") or {}).get("own", True)
    another = bool(report) and report["weights"] not in ("", weights_digest(saved.model))
    if report.get("flip") or not own or another:  # not what the code in the card does
        report = {}
    task, data = "image-classification", saved.config.data.name
    metadata: dict[str, Any] = {"library_name": LIBRARY, "license": "unknown", "pipeline_tag": task}
    results = "Not measured."
    if report:
        measured = {
            "task": {"type": task},
            "dataset": {"name": data, "type": data},
            "metrics": [{"type": "accuracy", "value": report["accuracy"]}],
        }
        metadata["model-index"] = [{"name": saved.name, "results": [measured]}]
        tables = metrics_table(report)
        if report["calibration"]:  # not in old reports
            tables += f"\n\n{calibration_table(report['calibration'])}"
        # Indented, because a class could be named ``` and end a fence.
        results = f"On {report['n']:,} test images:\n\n{textwrap.indent(tables, '    ')}"
    source = saved.config.model.pretrained
    if source and _is_public(source):
        base = source.removeprefix(TIMM).removeprefix(HUB).partition("@")[0]
        metadata["base_model"] = base if "/" in base else f"timm/{base}"
    template = Template(Path(__file__).with_suffix(".md").read_text("utf-8"))
    attention, name = saved.config.model.attention, saved.config.model.name
    load = f"vit.load_attention({json.dumps(attention)})  # a file of your own: upload it, too\n"
    return template.substitute(
        attention=f"\n{load}" if is_in_file(attention) else "",
        metadata=yaml.safe_dump(metadata, sort_keys=False).strip(),
        name=markdown(saved.name),
        place=json.dumps(f"{HUB}OWNER/{saved.name}"),
        kind="Vision Transformer" if name == "vit" else markdown(name.removeprefix(TIMM)),
        explain='classifier.explain("photo.jpg")  # what it attends to\n' if saved.has_maps else "",
        weights=f"{sum(weight.numel() for weight in saved.model.parameters()):,}",
        size=sides((*saved.preprocess.image_size, saved.preprocess.channels)),
        count=len(saved.classes),
        classes=markdown(", ".join(saved.classes)),
        library=LIBRARY,
        started=f"Started from the weights of {markdown(Path(source).name)}. " if source else "",
        steps=f"{saved.step:,}",
        data=data,
        results=results,
    )
