"""Settings of each command of eval.py; imported without torch.

A field without a default is what the command takes before its flags, such as the photos.
"""

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from vit.registry import ALL_KINDS
from vit.settings import (
    LARGE,
    Count,
    CountOrZero,
    DeviceName,
    FractionBelow1,
    PathName,
    Precision,
    Seed,
    Switch,
    Text,
    check,
    settings,
)

if TYPE_CHECKING:  # a type checker does not look into the registry
    MapKindName = str
else:
    MapKindName = Literal[*ALL_KINDS]
Coverage = Annotated[float, Field(gt=0, lt=1)]


@settings("data")
class EvalDataConfig:
    """The test images.

    Attributes:
        root: folder of the data set; null is the run's
    """

    root: PathName | None = None


@settings("model")
class EvalModelConfig:
    """The model.

    Attributes:
        attention: FILE.py:NAME of a run whose attention is your own
    """

    attention: tuple[PathName, ...] = ()


@settings("")
class EvalConfig:
    """What commands take.

    Attributes:
        data: the test images
        model: what the model's file does not contain
        out: folder for results; null is eval/ next to the model
        device: device to run on
        precision: precision of matrix products
    """

    model: EvalModelConfig = field(default_factory=EvalModelConfig)
    out: PathName | None = None
    device: DeviceName = "auto"
    precision: Precision = "auto"


@settings("")
class ImagesConfig(EvalConfig):
    """What commands that use the test images take.

    Attributes:
        batch_size: images per forward pass
        seed: random seed for choosing images
    """

    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    batch_size: Count = 500
    seed: Seed = 0


@settings("")
class ReportConfig(ImagesConfig):
    """Accuracy and other metrics on the test images, with figures.

    Attributes:
        flip: average the logits of each image and its mirror image
        coverage: fraction of images whose set of classes is to contain the true one, such as 0.9;
            null makes no sets
        unfamiliar: images of no class, to be told from the test images: a folder, a data set such
            as digits, or noise; null measures nothing
        corruptions: also classify the images with 15 corruptions at five severities
    """

    flip: Switch = False
    coverage: Coverage | None = None
    unfamiliar: PathName | None = None
    corruptions: Switch = False


@settings("")
class MapsConfig(ImagesConfig):
    """Attention maps of test images, and how faithful they are to the model.

    Attributes:
        probes: number of test images to draw
        kinds: kinds of map; null is those of few passes
        indices: which test images to draw, instead of random ones
        target: class to explain; null is the predicted class
        faithfulness: number of test images on which faithfulness is measured; null is 500, or 0
            with --indices
        head_fusion: how rollout combines heads
        discard_ratio: fraction of the weights that rollout drops
        start_layer: first layer of rollout, counted from 0
    """

    probes: Count = 8
    kinds: tuple[MapKindName, ...] = ()
    indices: tuple[int, ...] = ()
    target: Text | None = None
    faithfulness: CountOrZero | None = None
    head_fusion: Literal["mean", "max", "min"] = "mean"
    discard_ratio: FractionBelow1 = 0.0
    start_layer: CountOrZero = 0

    def __post_init__(self) -> None:
        allowed = f"0, or 2 to {LARGE} (a confidence interval needs two), or null"
        check(self, "faithfulness", self.faithfulness != 1, allowed)

    @property
    def faithfulness_images(self) -> int:
        """Number of test images on which the faithfulness of maps is measured; 0 is none."""
        if self.faithfulness is None:
            return 0 if self.indices else 500
        return self.faithfulness


@settings("")
class PhotoConfig(EvalConfig):
    """The most probable classes of photos, and a sheet with maps for each.

    Attributes:
        photos: image files, or folders of them
        kinds: kinds of map; null is rollout and lrp_pixels
        target: class to explain; null is the predicted class
    """

    photos: tuple[PathName, ...]
    kinds: tuple[MapKindName, ...] = ()
    target: Text | None = None


@settings("")
class PredictConfig(EvalConfig):
    """A table of predictions for image files.

    Attributes:
        photos: image files, or folders that are searched recursively
        out: the table, a .csv file; null is eval/photos.csv next to the model
        batch_size: images per forward pass
        flip: average the logits of each image and its mirror image
        coverage: fraction of images whose set of classes is to contain the true one, such as 0.9;
            null makes no sets
    """

    photos: tuple[PathName, ...]
    batch_size: Count = 500
    flip: Switch = False
    coverage: Coverage | None = None

    def __post_init__(self) -> None:
        check(self, "out", self.out is None or self.out.endswith(".csv"), "a .csv file")


@settings("")
class CompareConfig(ImagesConfig):
    """Accuracy and speed of models on the same test images, and how much their attention differs.

    Attributes:
        others: runs, model files or included models to compare with the first
        corruptions: also compare accuracy with 15 corruptions at five severities
    """

    others: tuple[PathName, ...]
    corruptions: Switch = False


@settings("")
class HeadsConfig(EvalConfig):
    """What the model loses on held-out images when heads are muted.

    Attributes:
        data: the data set of the run
        images: number of held-out images
        pairs: number of the heads that matter most, of which all pairs are muted too
        batch_size: images per forward pass
        seed: random seed for choosing images
    """

    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    images: Annotated[int, Field(ge=2, le=LARGE)] = 500
    pairs: Annotated[int, Field(ge=0, le=100)] = 8
    batch_size: Count = 500
    seed: Seed = 0


@settings("")
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
    out: PathName | None = None


class Command(NamedTuple):
    """A command of eval.py.

    Attributes:
        config: Its settings.
        function: Its function in `vit.reporting`, which takes a run and the settings.
        words: What it takes before its flags, as help texts call it.
    """

    config: Any
    function: str
    words: str = ""


COMMANDS = {
    "report": Command(ReportConfig, "report:evaluate_run"),
    "maps": Command(MapsConfig, "attention:explain_run"),
    "photo": Command(PhotoConfig, "predictions:classify_photos", "PHOTO ..."),
    "predict": Command(PredictConfig, "predictions:predict_files", "PHOTO ..."),
    "heads": Command(HeadsConfig, "heads:measure_run"),
    "compare": Command(CompareConfig, "comparison:compare_runs", "OTHER ..."),
    "export": Command(ExportConfig, "export:export_run", "FORMAT ..."),
}
