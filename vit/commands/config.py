"""Settings of each command of eval.py; imported without torch.

Fields without a default are positional arguments, such as the photos.
"""

from dataclasses import field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from vit import settings
from vit.explain.kinds import ALL_KINDS

MapKindName: TypeAlias = Literal[*ALL_KINDS]  # type: ignore[valid-type]
Views = Annotated[  # flags are text
    Literal[1, 2, 6],
    BeforeValidator(lambda value: {"1": 1, "2": 2, "6": 6}.get(str(value), value)),
]


@settings.group("data")
class EvalDataConfig:
    """The images.

    Attributes:
        root: folder of the data set; null is the run's
    """

    root: settings.PathName | None = None


@settings.group("model")
class EvalModelConfig:
    """The model.

    Attributes:
        attention: FILE:NAME of a run whose attention is your own
    """

    attention: tuple[settings.PathName, ...] = ()


@settings.group("")
class EvalConfig:
    """Settings of all commands that load a model.

    Attributes:
        out: folder for results; null is eval/ next to the model
        device: device to run on
        precision: precision; auto is float32
    """

    model: EvalModelConfig = field(default_factory=EvalModelConfig)
    out: settings.PathName | None = None
    device: settings.DeviceName = "auto"
    precision: settings.Precision = "auto"


@settings.group("")
class ImagesConfig(EvalConfig):
    """Settings of commands that use images of the data set.

    Attributes:
        batch_size: images per forward pass
        seed: random seed for choosing images
    """

    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    batch_size: settings.Count = 500
    seed: settings.Seed = 0


@settings.group("")
class ReportConfig(ImagesConfig):
    """Accuracy and other metrics on the test images, with figures.

    Attributes:
        flip: average the logits of each image and its mirror image, as --views 2
        views: views of an image whose logits are averaged: 1, 2, or 6 with shifts by a pixel, too
        coverage: fraction of images whose set of classes is to contain the true one, such as 0.9
        unfamiliar: images that belong to no class, to tell from the test images: a folder, a data
            set, or noise
        corruptions: also classify the images with 15 corruptions at five severities
    """

    flip: bool = False
    views: Views = 1
    coverage: settings.Between0And1 | None = None
    unfamiliar: settings.PathName | None = None
    corruptions: bool = False


@settings.group("")
class MapsConfig(ImagesConfig):
    """Attention maps of test images, and how faithful they are to the model.

    Attributes:
        probes: number of test images to draw
        kinds: kinds of map (default: the cheap ones)
        indices: which test images to draw, instead of random ones
        target: class to explain; null is the predicted class
        faithfulness: number of test images on which faithfulness is measured; null is 500, or 0
            with --indices
        head_fusion: how rollout combines heads
        discard_ratio: fraction of weights that rollout drops
        start_layer: first layer of rollout, counted from 0
    """

    probes: settings.Count = 8
    kinds: tuple[MapKindName, ...] = ()
    indices: tuple[int, ...] = ()
    target: settings.Text | None = None
    faithfulness: settings.CountOrZero | None = None
    head_fusion: Literal["mean", "max", "min"] = "mean"
    discard_ratio: settings.FractionBelow1 = 0.0
    start_layer: settings.CountOrZero = 0

    def __post_init__(self) -> None:
        allowed = "0, or 2 or more (a confidence interval needs two), or null"
        settings.check(self, "faithfulness", self.faithfulness != 1, allowed)


@settings.group("")
class PhotoConfig(EvalConfig):
    """The most probable classes of photos, and a sheet with maps for each.

    Attributes:
        photos: image files, or folders of them
        kinds: kinds of map; rollout and lrp_pixels unless given
        target: class to explain; null is the predicted class
    """

    photos: tuple[settings.PathName, ...]
    kinds: tuple[MapKindName, ...] = ()
    target: settings.Text | None = None


@settings.group("")
class PredictConfig(EvalConfig):
    """A table of predictions for image files.

    Attributes:
        photos: image files, or folders that are searched recursively
        out: the table, a .csv file; null is eval/photos.csv next to the model
        batch_size: images per forward pass
        flip: average the logits of each image and its mirror image, as --views 2
        views: views of an image whose logits are averaged: 1, 2, or 6 with shifts by a pixel, too
        coverage: fraction of images whose set of classes is to contain the true one, such as 0.9
    """

    photos: tuple[settings.PathName, ...]
    batch_size: settings.Count = 500
    flip: bool = False
    views: Views = 1
    coverage: settings.Between0And1 | None = None

    def __post_init__(self) -> None:
        settings.check(self, "out", self.out is None or self.out.endswith(".csv"), "a .csv file")


@settings.group("")
class CompareConfig(ImagesConfig):
    """Accuracy and speed of models on the same test images, and how much their attention differs.

    Attributes:
        others: runs, model files or included models to compare with the first
        against: runs of a second group, such as seeds of another model; those before are the first
        corruptions: also compare accuracy with 15 corruptions at five severities
    """

    others: tuple[settings.PathName, ...]
    against: tuple[settings.PathName, ...] = ()
    corruptions: bool = False


@settings.group("")
class HeadsConfig(ImagesConfig):
    """What the model loses on held-out images when heads are muted.

    Attributes:
        images: number of held-out images
        pairs: number of the heads that matter most, of which all pairs are muted too
    """

    images: Annotated[int, Field(ge=2, le=settings.LARGE)] = 500
    pairs: Annotated[int, Field(ge=0, le=100)] = 8


@settings.group("")
class CheckConfig:
    """What is wrong with an attention of your own; RUN is FILE:NAME, see model.attention.

    Attributes:
        json: file for the rows
    """

    json: settings.PathName | None = None

    def __post_init__(self) -> None:
        fits = self.json is None or self.json.endswith(".json")
        settings.check(self, "json", fits, "a .json file")


@settings.group("")
class ExportConfig:
    """The model in formats of other programs, or its Attention tab as one file.

    Attributes:
        formats: timm for timm.create_model, onnx for ONNX Runtime, torch for torch.export.load,
            html for the Attention tab in a browser, hub for the Hugging Face Hub
        steps: logged steps in html
        out: folder for the exports; null is export/ next to the model
    """

    formats: tuple[Literal["timm", "onnx", "torch", "html", "hub"], ...]
    steps: Literal["all", "last"] = "all"
    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    model: EvalModelConfig = field(default_factory=EvalModelConfig)
    out: settings.PathName | None = None


# The settings of each command; the function `run` in the file of its name takes a model and these.
COMMANDS: dict[str, Any] = {
    "report": ReportConfig,
    "maps": MapsConfig,
    "photo": PhotoConfig,
    "predict": PredictConfig,
    "heads": HeadsConfig,
    "compare": CompareConfig,
    "export": ExportConfig,
    "check": CheckConfig,
}
