"""The Attention tab as one file, which a browser opens without a server.

It contains the files of the tab and what the plugin answers to every question that the tab asks,
compressed. page.js starts it. The page may connect to nothing and run no script but its own.
"""

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlencode

from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from werkzeug.test import Client

from vit.tensorboard_plugin.encoding import PLUGIN_NAME
from vit.tensorboard_plugin.plugin import AttentionPlugin

LARGEST_LIVE = 100_000_000  # bytes of float32 weights
TOO_LARGE = "The model is larger than 100 MB, so this file cannot run it; TensorBoard can."
POLICY = (
    "default-src 'none'; script-src blob: 'wasm-unsafe-eval' '{script_hash}'; worker-src blob:; "
    "style-src blob: 'unsafe-inline'; img-src blob: data:; connect-src 'none'; base-uri 'none'; "
    "form-action 'none'"
)
PAGE_START = '<!doctype html>\n<html lang="en" data-page="vit-from-scratch">\n'
PAGE = (
    PAGE_START
    + """<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<body>
{elements}
<script>{script}</script>
"""
)
ELEMENT = (
    '<script type="application/octet-stream" data-name="{name}" data-type="{type}" '
    'data-status="{status}">{content}</script>'
)


def page_of(logs: Mapping[str, Path], title: str, *, last_step: bool = False) -> bytes | None:
    """Return the Attention tab of runs as an HTML file.

    Args:
        logs: Log directories by the names of the runs; a name may contain anything.
        title: Title of the page.
        last_step: Whether to leave out all steps but the last.

    Returns:
        The file; None if there are no records in the logs.
    """
    answers = _Answers(logs, steps=1 if last_step else 0)
    runs = answers.ask("runs")["runs"]
    for name in (run["name"] for run in runs):
        for image in answers.ask("images", run=name).get("images", []):
            for at in image["steps"]:
                place = {"run": name, "tag": image["tag"], "step": at["step"]}
                answers.ask("details", **place)
                if image["has_weights"]:
                    answers.ask("weights", **place)
        live = answers.ask("live", run=name)
        if live.get("spec") and 4 * live["spec"]["floats"] > LARGEST_LIVE:
            refusal = {"spec": None, "steps": [], "note": TOO_LARGE}
            answers.keep(_key("live", run=name), json.dumps(refusal).encode())
        elif live.get("steps"):
            answers.ask("live_graph", run=name)
            for at in live["steps"]:
                answers.ask("live_weights", run=name, step=at["step"])
    return answers.page(title) if runs else None


class _Answers:
    """Asks the plugin as the tab does, and keeps the answers.

    Args:
        logs: Log directories by the names of the runs.
        steps: Number of steps to keep, the last one among them; 0 keeps all.
    """

    def __init__(self, logs: Mapping[str, Path], steps: int) -> None:
        multiplexer = EventMultiplexer(
            {name: str(folder) for name, folder in logs.items()},
            tensor_size_guidance={PLUGIN_NAME: steps},
        ).Reload()
        context = TBContext(data_provider=MultiplexerDataProvider(multiplexer, ""))
        self._apps = AttentionPlugin(context).get_plugin_apps()
        self._elements: dict[str, str] = {}
        for path in self._apps:
            if PurePath(path).suffix:
                self.keep(path.removeprefix("/"), *self._get(path))

    def ask(self, route: str, **parameters: Any) -> dict[str, Any]:
        """Keep the answer to a question; return it if it is JSON."""
        if f"/{route}" not in self._apps:
            return {}
        key = _key(route, **parameters)
        data, mimetype, status = self._get(f"/{route}", key.partition("?")[2])
        self.keep(key, data, mimetype, status)
        found: dict[str, Any] = json.loads(data) if mimetype == "application/json" else {}
        return found

    def keep(
        self, name: str, data: bytes, mimetype: str = "application/json", status: int = 200
    ) -> None:
        """Keep a file or an answer, in place of an earlier one of that name."""
        content = base64.b64encode(gzip.compress(data, mtime=0)).decode()
        self._elements[name] = ELEMENT.format(
            name=html.escape(name), type=mimetype, status=status, content=content
        )

    def page(self, title: str) -> bytes:
        """Return the page with all that has been kept."""
        script = (resources.files("vit.tensorboard_plugin") / "page.js").read_text("utf-8")
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        return PAGE.format(
            policy=POLICY.format(script_hash=f"sha256-{digest}"),
            title=html.escape(title),
            elements="\n".join(self._elements.values()),
            script=script,
        ).encode()

    def _get(self, path: str, query: str = "") -> tuple[bytes, str, int]:
        response = Client(self._apps[path]).get("/", query_string=query)
        return response.data, response.mimetype, response.status_code


def _key(route: str, **parameters: Any) -> str:
    """Return a question as the tab writes it with URLSearchParams."""
    return f"{route}?{urlencode(parameters, safe='*').replace('~', '%7E')}"
