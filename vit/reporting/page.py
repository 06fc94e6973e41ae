"""Export of the Attention tab as one file, which a browser opens without a server.

It contains the files of the tab, and the plugin's answers to all requests of the tab. page.html
forbids it to connect to anything; page.js starts it.
"""

import base64
import gzip
import hashlib
import json
import tempfile
from collections.abc import Callable
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

from vit.console import printable, say
from vit.files import require_file, write_atomically
from vit.model_file import SavedModel
from vit.reporting.loading import require_replaceable
from vit.run.folder import ATTENTION_FOLDER, EVAL_FOLDER
from vit.tensorboard_plugin.plugin import AttentionPlugin

MARK = b'data-page="vit-from-scratch"'  # in page.html
FOR_GPU = ".jspi."  # files of ONNX Runtime that a page leaves out, to be smaller
LARGEST_LIVE = 25_000_000  # weights of a model, 100 MB
TOO_LARGE = "The model is larger than 100 MB, so it runs in TensorBoard, but not in this file."


def export_page(saved: SavedModel, target: Path, steps: str, log: Callable[[Path], None]) -> None:
    """Write what training and `eval.py RUN maps` have logged as an HTML file.

    It shows the logged `steps`: "all" or "last". `log` logs images in a folder, for a model of
    which nothing is logged, as for an earlier checkpoint. ValueError if another file is in the way,
    or if there are no logs and no test images or attention maps.
    """
    is_own = target.exists() and MARK in require_file(target).read_bytes()
    require_replaceable(is_own, [target], "is not an export")
    below = f"{EVAL_FOLDER}/{ATTENTION_FOLDER}"
    logs = {saved.name: saved.run, f"{saved.name}/{below}": saved.run / below}
    for events in (file for folder in logs.values() for file in folder.glob("*tfevents*")):
        require_file(events)
    elements = [] if saved.superseded else _elements(logs, steps)
    if not elements:
        with tempfile.TemporaryDirectory() as folder:
            log(Path(folder))
            elements = _elements({saved.name: Path(folder)}, steps)
    script = Path(__file__).with_suffix(".js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = Template(Path(__file__).with_suffix(".html").read_text("utf-8"))
    page = template.substitute(
        title=escape(saved.name), elements="\n".join(elements), script=script, digest=digest
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, page.encode())
    say(f"wrote {printable(target)}, {len(page) / 1e6:.1f} MB")


def _elements(logs: dict[str, Path], steps: str) -> list[str]:
    """Return an element for each file and answer; none if the runs, by name, have no attention."""
    multiplexer = EventMultiplexer(
        {name: str(folder) for name, folder in logs.items() if folder.is_dir()},
        tensor_size_guidance={AttentionPlugin.plugin_name: int(steps == "last")},  # 0 keeps all
    )
    provider = MultiplexerDataProvider(multiplexer.Reload(), "")
    apps = AttentionPlugin(TBContext(data_provider=provider)).get_plugin_apps()
    elements: list[str] = []
    ask = partial(_ask, apps, elements, -1 if steps == "last" else 0)
    runs = [run["name"] for run in ask("runs")["runs"]]
    for path in apps:
        if runs and "." in path and FOR_GPU not in path:
            ask(path[1:])
    for run in runs:
        shared: set[tuple[str, int]] = set()  # images share frames
        for image in ask("images", run=run).get("images", []):
            for step in (at["step"] for at in image["steps"]):
                for part in ("details", "weights")[: 1 + image["has_weights"]]:
                    ask(part, run=run, tag=image["tag"], step=step)
                shared |= {(tag, step) for tag in (image["features"] or {}).values()}
        for tag, step in sorted(shared):
            ask("features", run=run, tag=tag, step=step)
        if live := ask("live", run=run).get("steps", []):
            ask("live_graph", run=run)
        for at in live:
            ask("live_weights", run=run, step=at["step"])
    return elements if runs else []


def _ask(apps: dict[str, Any], elements: list[str], first: int, route: str, **query: Any) -> Any:
    """Add the answer to a request of api.js to the elements; return it if it is JSON."""
    text = urlencode(query, safe="*").replace("~", "%7E")  # as URLSearchParams does
    response = Client(apps[f"/{route}"]).get(query_string=text)
    name = f"{route}?{text}".removesuffix("?")
    data, answer = response.data, response.get_json(silent=True) or {}
    if answer.get("spec"):
        answer["steps"] = answer["steps"][first:]
        if answer["spec"]["floats"] > LARGEST_LIVE:
            answer = {"spec": None, "steps": [], "note": TOO_LARGE}
        data = json.dumps(answer).encode()
    elements.append(
        f'<script type="application/octet-stream" data-name="{escape(name)}" '
        f'data-type="{response.mimetype}" data-status="{response.status_code}">'
        f"{base64.b64encode(gzip.compress(data, mtime=0)).decode()}</script>"
    )
    return answer
