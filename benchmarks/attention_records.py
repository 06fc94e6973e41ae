"""The size of what is logged for the Attention tab of TensorBoard.

    python benchmarks/attention_records.py RUN [RUN ...]

For each run folder: images, steps, the bytes of the details and the weights of one image at one
step, the weights' bytes before compression, the total, and its fraction of the run's event files.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import timing  # noqa: F401  finds vit from any folder
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vit.tensorboard_plugin.encoding import PLUGIN_NAME, decode_weights, part_of


def main() -> None:
    """Print a table of the runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run folder")
    runs = parser.parse_args().runs
    print("run | images | steps | details, bytes | weights, bytes | raw | total, MB | of all files")
    print("---|---|---|---|---|---|---|---")
    for run in runs:
        events = EventAccumulator(str(run), size_guidance={"tensors": 0}).Reload()
        sizes = defaultdict[str, list[int]](list)
        steps, raw = set(), 0
        for tag in events.PluginTagToContent(PLUGIN_NAME):
            part = part_of(events.SummaryMetadata(tag).plugin_data.content)
            for event in events.Tensors(tag):
                (data,) = event.tensor_proto.string_val
                sizes[part].append(len(data))
                steps.add(event.step)
                raw = decode_weights(data)[0].size if part == "weights" else raw
        total = sum(map(sum, sizes.values()))
        everything = sum(path.stat().st_size for path in run.glob("events.out.tfevents.*"))
        means = [round(sum(s) / max(len(s), 1)) for s in (sizes["details"], sizes["weights"])]
        images = len(sizes["details"]) // max(len(steps), 1)
        print(
            f"{run} | {images} | {len(steps)} | {means[0]:,} | {means[1]:,} | {raw:,} | "
            f"{total / 1e6:.2f} | {total / everything:.0%}"
        )


if __name__ == "__main__":
    main()
