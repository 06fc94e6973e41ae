"""Settings of an evaluation; imported without torch."""

from dataclasses import field
from typing import TYPE_CHECKING, Literal

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
    require,
    settings,
)

if TYPE_CHECKING:  # a type checker does not look into the registry
    MapKindName = str
else:
    MapKindName = Literal[*ALL_KINDS]


@settings("data")
class EvalDataConfig:
    """The test images.

    Attributes:
        root: folder where data sets are stored or downloaded to; null uses the folder of the
            training run
        download: download the data set if it is not in root
    """

    root: PathName | None = None
    download: Switch = True


@settings("model")
class EvalModelConfig:
    """The model.

    Attributes:
        attention: for models that were trained with attention of a Python file, that file:
            my_attention.py:function; model files contain its name and no code
    """

    attention: tuple[PathName, ...] = ()


@settings("")
class EvalConfig:
    """The evaluation.

    Attributes:
        data: the test images
        model: what the model's file does not contain
        out: folder for the report and the figures; null is eval/ next to the model; with --predict,
            a .csv file, with --export onnx a .onnx file and with --export torch a .pt2 file
        device: device to run on; auto chooses a GPU if there is one
        precision: precision of matrix products: float32 or bfloat16; auto chooses bfloat16 where
            the hardware supports it
        batch_size: images per forward pass
        flip: average the logits of each image and its mirror image, which takes twice as long; for
            the report and --predict
        probes: number of randomly chosen test images whose attention maps are drawn
        seed: random seed for choosing images
        attention: draw and save every kind of attention map for some test images, also for the
            Attention tab of TensorBoard, and measure how faithful the maps are to the model
        indices: with --attention, indices of the test images to draw, instead of random ones
        target: with --attention or --image, name of the class to explain; null explains the
            predicted class
        kinds: with --attention or --image, kinds of map to draw and, with --attention, to measure;
            without it, rollout and lrp_pixels with --image, otherwise all that take few passes;
            occlusion, integrated_gradients and rise take 16 to 1,000 passes
        faithfulness: with --attention, number of test images on which the faithfulness of the maps
            is measured; 0 skips the measurement; null means 500, or 0 with --indices
        head_fusion: with --attention, how rollout combines the attention heads
        discard_ratio: with --attention, fraction of the lowest attention weights that rollout sets
            to zero
        start_layer: with --attention, first layer that rollout includes, counted from 0
        image: image files to classify and explain, or folders of them
        predict: image files to classify, or folders that are searched recursively; writes a table,
            by default eval/photos.csv next to the model
        export: write the model in a format that other programs load, by default into export/ next
            to the model, and check the result: timm for timm.create_model, onnx for ONNX Runtime,
            torch for torch.export.load
        compare: other run folders, model files or included models to compare with on the same test
            images; writes a table and a picture
    """

    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    model: EvalModelConfig = field(default_factory=EvalModelConfig)
    out: PathName | None = None
    device: DeviceName = "auto"
    precision: Precision = "auto"
    batch_size: Count = 500
    flip: Switch = False
    probes: CountOrZero = 8
    seed: Seed = 0
    attention: Switch = False
    indices: tuple[int, ...] = ()
    target: Text | None = None
    kinds: tuple[MapKindName, ...] = ()
    faithfulness: int | None = None
    head_fusion: Literal["mean", "max", "min"] = "mean"
    discard_ratio: FractionBelow1 = 0.0
    start_layer: CountOrZero = 0
    image: tuple[PathName, ...] = ()
    predict: tuple[PathName, ...] = ()
    export: Literal["timm", "onnx", "torch"] | None = None
    compare: tuple[PathName, ...] = ()

    def __post_init__(self) -> None:
        require(
            self.faithfulness is None or self.faithfulness == 0 or 2 <= self.faithfulness <= LARGE,
            "faithfulness",
            self.faithfulness,
            f"0, or 2 to {LARGE} (a confidence interval needs two), or null",
        )
        modes = {
            "attention": self.attention,
            "image": self.image,
            "predict": self.predict,
            "export": self.export,
            "compare": self.compare,
        }
        chosen = [name for name, value in modes.items() if value]
        if len(chosen) > 1:
            raise ValueError(f"{chosen[1]}: not together with --{chosen[0]}; run eval.py twice")
        if self.flip and chosen not in ([], ["predict"]):
            raise ValueError(f"flip: not together with --{chosen[0]}")
        of_attention = {
            "indices": self.indices,
            "faithfulness": self.faithfulness is not None,
            "head_fusion": self.head_fusion != "mean",
            "discard_ratio": self.discard_ratio,
            "start_layer": self.start_layer,
        }
        for name, value in of_attention.items():
            if value and not self.attention:
                raise ValueError(f"{name}: only with --attention")
        if self.attention and not self.indices:
            require(self.probes > 0, "probes", self.probes, "at least 1 with --attention")
        for name, given in {"target": self.target is not None, "kinds": self.kinds}.items():
            if given and not (self.attention or self.image):
                raise ValueError(f"{name}: only with --attention or --image")
        if self.export is not None:  # the model is written and checked in float32 on the CPU
            allowed = {"device": ("auto", "cpu"), "precision": ("auto", "float32")}
            for name, values in allowed.items():
                value = getattr(self, name)
                require(value in values, name, value, f"{' or '.join(values)} with --export")
        if self.out is not None:
            suffix = self.out_suffix
            require(self.out.endswith(suffix), "out", self.out, f"a {suffix} file here")

    @property
    def out_suffix(self) -> str:
        """The suffix of the file that `out` names; "" where it is a folder."""
        if self.predict:
            return ".csv"
        return {"onnx": ".onnx", "torch": ".pt2"}.get(self.export or "", "")

    @property
    def faithfulness_images(self) -> int:
        """Number of test images on which the faithfulness of maps is measured; 0 is none."""
        if self.faithfulness is None:
            return 0 if self.indices else 500
        return self.faithfulness
