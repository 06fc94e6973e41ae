"""Loading a trained model from a run, a file, a folder or the Hub."""

from dataclasses import replace
from pathlib import Path

from vit.hub import HUB, download
from vit.model_file import SavedModel, build_saved, load_saved
from vit.pretrained.transformers import read_classifier, transformers_folder
from vit.run.folder import MODEL_FILE


def load(name: str | Path, device: str = "auto", precision: str = "auto") -> SavedModel:
    """Load a trained model.

    Args:
        name: Run folder (its finished model, or else its newest checkpoint), model.safetensors,
            checkpoint, included model such as "cifar10", folder of a classifier as transformers
            saves it, or "hf-hub:OWNER/NAME" on the Hugging Face Hub.
        device: "auto" (an accelerator if there is one), "cpu", "cuda", "mps" or "xpu".
        precision: "auto" (float32, like exports), "float32" or "bfloat16".

    Returns:
        A `vit.Classifier` that knows its config and its run, for `vit.evaluate` and `vit.export`.

    Raises:
        ValueError: There is no such model, the file is not a model of this project, or the device
            is not available.
    """
    if str(name).startswith(HUB):
        home = Path("runs") / str(name).removeprefix(HUB).replace("/", "-")
        return replace(load(download(str(name)), device, precision), home=home)
    if folder := transformers_folder(Path(name)):
        about, weights = read_classifier(folder)
        return build_saved(folder / MODEL_FILE, about, weights, device, precision)
    return load_saved(name, device, precision)
