"""The comparison of models as text: a table and a sentence about each pair, in Markdown.

It is made from the contents of comparison.json, see `vit.reporting.comparison.compare_runs`.
"""

from typing import Any

from vit.console import counted
from vit.reporting.tables import text_table, with_interval


def as_markdown(content: dict[str, Any], picture: str | None) -> str:
    """Format a comparison as a Markdown document.

    Args:
        content: The comparison.
        picture: File name of the picture; None if there is none.
    """
    names = [model["name"] for model in content["models"]]
    corrected = "" if len(names) == 2 else ", not corrected for the number of comparisons"
    parts = [
        f"# Comparison of {', '.join(names[:-1])} and {names[-1]}",
        as_text(content),
        f"p is that of McNemar's exact test against {names[0]}{corrected}. Speed is the median "
        f"over batches of {content['batch_size']:,}, in which the models take turns: "
        f"{content['hardware']}.",
    ]
    if picture is not None:
        parts.append(f"![Attention rollout of {', '.join(content['drawn'])}]({picture})")
    return "\n\n".join(parts) + "\n"


def as_text(content: dict[str, Any]) -> str:
    """Format what a terminal shows of a comparison: heading, aligned table and sentences."""
    rows = _cells(content)
    rows.insert(1, ["---"] * len(rows[0]))
    table = (f"| {line} |" for line in text_table(rows, " | "))
    title = f"{content['data']}: {content['images']:,} test images"
    sentences = (f"- {sentence}." for sentence in _sentences(content))
    return "\n".join([title, "", *table, "", *sentences])


def _cells(content: dict[str, Any]) -> list[list[str]]:
    """Return the titles of the columns, followed by a row of texts per model."""
    balanced = "balanced_accuracy" in content["models"][0]
    head = ["model", "architecture", "parameters", "training", "accuracy (95% interval)"]
    head += ["balanced"] if balanced else []
    rows = [[*head, f"p against {content['models'][0]['name']}", "images/s"]]
    p_values = ["–", *(_p_value(pair["mcnemar_p"]) for pair in content["pairs"])]
    for model, p_value in zip(content["models"], p_values, strict=True):
        row = [
            model["name"],
            model["architecture"],
            f"{model['parameters']:,}",
            _training(model),
            with_interval(model, "accuracy", ".2%"),
            *([f"{model['balanced_accuracy']:.2%}"] if balanced else []),
            p_value,
            f"{model['images_per_second']:,.0f}",
        ]
        rows.append(row)
    return [[cell.replace("|", "\\|") for cell in row] for row in rows]


def _training(model: dict[str, Any]) -> str:
    """Say how long a model was to be trained, from what, and whether it was."""
    if model["budget_minutes"] is not None:
        length = (
            f"{counted(model['steps'], 'step', ',')}, budget of {model['budget_minutes']:g} min"
        )
    else:
        length = counted(model["epochs"], "epoch")
    start = ", pretrained" if model["pretrained"] else ""
    end = "" if model["finished"] else f", unfinished: step {model['steps']:,}"
    return f"{length}{start}{end}"


def _p_value(p_value: float) -> str:
    return f"{p_value:.2g}" if p_value > 0 else "< 1e-300"


def _sentences(content: dict[str, Any]) -> list[str]:
    """Return a sentence about each pair of models, without its full stop."""
    sentences = []
    for pair in content["pairs"]:
        first, other, only = pair["first"], pair["other"], pair["only_right"]
        p_value = _p_value(pair["mcnemar_p"])
        value = f"p {p_value}" if p_value.startswith("<") else f"p = {p_value}"
        verdict = "significant" if pair["mcnemar_p"] < 0.05 else "not significant"
        sentence = (
            f"{first} and {other}: only {first} is right on {counted(only[0], 'image', ',')}, only "
            f"{other} on {only[1]:,}; McNemar's exact test: {value}; the difference is {verdict} "
            "at the 5% level"
        )
        if "moved_attention" in pair:
            sentence += (
                f"; {pair['moved_attention']:.1%} of the attention (rollout, class-agnostic) is on "
                "other patches"
            )
        if pair.get("most_moved"):
            most = ", ".join(str(moved["index"]) for moved in pair["most_moved"])
            sentence += f", most on images {most}"
        sentences.append(sentence)
    return sentences
