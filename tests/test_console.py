"""Untrusted names cannot control a terminal, break a table or act as Markdown."""

import html
import io
import re
import sys
from pathlib import Path

import markdown as python_markdown
import pytest
from hypothesis import given
from hypothesis import strategies as st

from small_runs import ROOT, draw_pictures, tiny
from vit.commands.train import train
from vit.console import note, printable, program, say
from vit.reporting.tables import markdown

CLASSES = (
    "\x1b]52;c;aGVsbG8=\x07", "\u202egnp.exe", "a\nerror: b", "猫|dog", "```",
    "<img src=x onerror=a()>", "[x](javascript:a())", "**b** _c_ `d`", "=1+1", "e\u0301\u200b",
)  # fmt: skip


def test_what_is_printed_cannot_control_a_terminal(capsys):
    say("a\x1b[2J\r\n\u202eb 猫é")
    note("c\nd\x9b31m\udcff")
    assert capsys.readouterr() == ("a\\x1b[2J\\r\n\\u202eb 猫é\n", "c d\\x9b31m\\udcff\n")
    for encoding, expected in (("ascii", b"\\xe9 \\u732b\n"), ("cp1252", b"\xe9 \\u732b\n")):
        say("é 猫", file=(stream := io.TextIOWrapper(io.BytesIO(), encoding, newline="")))
        assert stream.detach().getvalue() == expected


@given(st.text())
def test_any_text_is_one_line_of_printable_characters(text):
    line = printable(text)
    assert line.isprintable()
    assert printable(line) == line
    plain = text.isprintable() and text == " ".join(text.split())
    assert line == text if plain else line != text


@given(st.text(st.sampled_from("ab_*`[]()<>|!&~#$\\\n \t-:.x")))
def test_markdown_shows_any_text_as_it_is(text):
    page = python_markdown.markdown(f"x {markdown(text)} y")
    assert "<" not in page[3:-4] and html.unescape(page) == f"<p>x {printable(text)} y</p>"


def test_markdown_makes_no_links_or_mentions():
    for text in ("http://x.y", "www.x.y", "@octocat", "<http://x.y>"):
        assert not {"://", "www.", "@", "<"} & {*re.findall(r"://|www\.|@|<", markdown(text))}
        assert html.unescape(markdown(text)) == text


def test_nothing_is_printed_where_the_output_is_closed(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    say("a")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six pictures of each class, and one that cannot be read."""
    root = tmp_path_factory.mktemp("pictures")
    draw_pictures(root, 6 * len(CLASSES), CLASSES, "\x1b[31m{}.png")
    (root / CLASSES[0] / "\x1b[2Jbad\n.png").touch()
    return root


def shown(text: str) -> list[str]:
    """Check that text is made of whole lines of printable characters; return them."""
    assert text.replace("\n", "").isprintable(), text
    assert not any(line.startswith("error: b") for line in text.splitlines())
    return text.splitlines()


def test_every_command_prints_the_names_of_others_as_text(pictures, tmp_path, call, capsys):
    run = tmp_path / "<b>\x1b[1m\nerror: b"
    train(tiny(run, pictures, data={"val_size": 10, "on_bad_image": "skip"}))
    trained = capsys.readouterr()
    assert any("\\x1b[2Jbad" in line for line in shown(trained.err)) and shown(trained.out)

    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes())
    for words in (
        ("report", "--coverage", "0.1"), ("maps", "--faithfulness", "0", "--probes", "2"),
        ("predict", pictures), ("photo", pictures / CLASSES[0]), ("heads",), ("compare", other),
        ("export", "hub"),
    ):  # fmt: skip
        ended = call(run, *words)
        assert ended.code == 0 and shown(ended.out), ended
        shown(ended.error)
        if words[0] == "report":
            table = [line for line in ended.out.splitlines() if "%" in line and "(" in line]
            assert any(line.startswith("\\x1b]52;c;aGVsbG8=\\x07 ") for line in table)
    refused = call(run, "photo", pictures / CLASSES[1], "--target", "\x1b]0;x\x07")
    assert refused.code == 2 and len(shown(refused.error)) == 1

    card = (run / "export/hub/README.md").read_text()
    page = python_markdown.markdown(card.split("---\n", 2)[2], extensions=["tables", "fenced_code"])
    assert page.count("<h1>") == 1 and page.count("<h2>") == 4
    for part in ("<img", "<a ", "<strong>", "<em>", "<li>", "\x1b"):
        assert part not in page, part
    assert 'hf-hub:OWNER/<b>\\u001b[1m\\nerror: b"' in html.unescape(page)
    (folder,) = (run / "eval").glob("compare_*")
    page = python_markdown.markdown((folder / "comparison.md").read_text(), extensions=["tables"])
    assert page.count("<tr>") == 3 and "<b>" not in page


def test_the_users_own_script_is_not_taken_for_ours(tmp_path, monkeypatch):
    for folder, name in ((ROOT, "eval.py"), (tmp_path, "vit-eval")):
        monkeypatch.setattr(sys, "argv", [str(folder / "train.py")])
        assert program("eval").endswith(name)
