"""Export of the Attention tab as one file, which a browser opens without a server.

It contains the files of the tab, and what the plugin answers to all that the tab can ask. page.html
forbids it to connect to anything; page.js starts it.
"""

import base64
import gzip
import hashlib
import json
import tempfile
from functools import partial
from html import escape
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import urlencode

from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from werkzeug.test import Client

from vit.files import write_atomically
from vit.model_file import SavedModel
from vit.reporting.attention import log_test_images
from vit.run.folder import ATTENTION_FOLDER, EVAL_FOLDER
from vit.tensorboard_plugin.encoding import PLUGIN_NAME
from vit.tensorboard_plugin.plugin import AttentionPlugin

MARK = b'data-page="vit-from-scratch"'  # in page.html
LARGEST_LIVE = 25_000_000  # weights of a model, 100 MB
TOO_LARGE = "The model is larger than 100 MB, so it runs in TensorBoard, but not in this file."


def export_page(saved: SavedModel, target: Path, steps: str, root: str | None) -> None:
    """Write what training and `eval.py RUN maps` have logged as an HTML file.

    If they have logged nothing, it shows the test images that `maps` chooses.

    Args:
        saved: The model.
        target: The file.
        steps: "all", or "last" for the last step of each image.
        root: Folder of the test images; None is that of the training run.

    Raises:
        ValueError: Another file is in the way, or there is nothing to show: no logs, and no test
            images or no attention maps.
    """
    if target.exists() and MARK not in target.read_bytes():
        raise ValueError(f"out: {target} exists and is not an export; use another --out")
    below = f"{EVAL_FOLDER}/{ATTENTION_FOLDER}"
    logs = {saved.name: saved.run, f"{saved.name}/{below}": saved.run / below}
    elements = _elements(logs, steps)
    if not elements:
        with tempfile.TemporaryDirectory() as folder:
            log_test_images(saved, root, Path(folder))
            elements = _elements({saved.name: Path(folder)}, steps)
    template, script = (
        Path(__file__).with_suffix(end).read_text("utf-8") for end in (".html", ".js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = (
        Template(template)
        .substitute(
            title=escape(saved.name), elements="\n".join(elements), script=script, digest=digest
        )
        .encode()
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, page)
    print(f"wrote {target}, {len(page) / 1e6:.1f} MB")


def _elements(logs: dict[str, Path], steps: str) -> list[str]:
    """Return an element for each file and answer; none if the runs, by name, have no attention."""
    multiplexer = EventMultiplexer(
        {name: str(folder) for name, folder in logs.items() if folder.is_dir()},
        tensor_size_guidance={PLUGIN_NAME: int(steps == "last")},  # 0 keeps all
    )
    provider = MultiplexerDataProvider(multiplexer.Reload(), "")
    apps = AttentionPlugin(TBContext(data_provider=provider)).get_plugin_apps()
    elements: dict[str, str] = {}
    ask = partial(_ask, apps, elements, 0 if steps == "all" else -1)
    for path in apps:
        if "." in path:
            ask(path.removeprefix("/"))
    runs = [run["name"] for run in ask("runs")["runs"]]
    for run in runs:
        for image in ask("images", run=run).get("images", []):
            for at in image["steps"]:
                for part in ("details", "weights")[: 1 + image["has_weights"]]:
                    ask(part, run=run, tag=image["tag"], step=at["step"])
        for at in ask("live", run=run).get("steps", []):
            ask("live_graph", run=run)
            ask("live_weights", run=run, step=at["step"])
    return list(elements.values()) if runs else []


def _ask(
    apps: dict[str, Any], elements: dict[str, str], first_step: int, route: str, **parameters: Any
) -> Any:
    """Add an answer to the elements, by the name that api.js gives it; return it if it is JSON."""
    if f"/{route}" not in apps:
        return {}
    query = urlencode(parameters, safe="*").replace("~", "%7E")  # as URLSearchParams does
    response = Client(apps[f"/{route}"]).get(query_string=query)
    data, found = response.data, response.get_json(silent=True) or {}
    if found.get("spec"):
        found["steps"] = found["steps"][first_step:]
        if found["spec"]["floats"] > LARGEST_LIVE:
            found = {"spec": None, "steps": [], "note": TOO_LARGE}
        data = json.dumps(found).encode()
    name = route if "." in route else f"{route}?{query}"
    elements[name] = (
        f'<script type="application/octet-stream" data-name="{escape(name)}" '
        f'data-type="{response.mimetype}" data-status="{response.status_code}">'
        f"{base64.b64encode(gzip.compress(data, mtime=0)).decode()}</script>"
    )
    return found
