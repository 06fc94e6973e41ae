"""Weights as transformers saves them, renamed for our VisionTransformer or a timm model.

`save_pretrained` writes config.json, model.safetensors and, for the image processor,
preprocessor_config.json. They are read without transformers.
"""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from PIL import Image
from torch import Tensor

from vit.config import Config
from vit.console import warn
from vit.data.config import IMAGENET, DataConfig
from vit.data.preprocess import Preprocess
from vit.files import require_file
from vit.model.config import ModelConfig
from vit.model.timm_model import NORM_EPS
from vit.model_file import ModelMetadata, is_own_file
from vit.pretrained.adapt import Pretrained, fit
from vit.pretrained.architecture import OF_TIMM, adopt, settings_of_weights, understood
from vit.run.folder import MODEL_FILE
from vit.settings import parse

MODEL_TYPES = ("vit", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit", "beit", "siglip")
OF_IMAGENET = ("deit", "dinov2", "dinov2_with_registers", "dinov3_vit")  # with its mean and std
# SigLIP's defaults, which config.json leaves out.
SIGLIP = {"num_attention_heads": 12, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}
# For pretraining or texts, and a layer that features and classifiers do not use.
UNUSED = r"mask_token|position_(ids|index)|^logit_|^(text_model|lm_head|decoder|pooler\.dense)\."
RENAMED = (  # patterns and their replacements, one after the other
    (r"^(vit|deit|beit|dinov2|dinov2_with_registers|vision_model|model)\.", ""),
    (r"^embeddings\.patch_embeddings?\.(projection\.)?", "patch_embed.proj."),
    (r"^embeddings\.position_embeddings?(\.weight)?$", "pos_embed"),
    (r"^embeddings\.(distillation_token|register_tokens)$", "reg_token"),
    (r"^embeddings\.", ""),
    (r"^encoder\.relative_position_bias\.", "rel_pos_bias."),
    (r"^(encoder\.)?layers?\.(\d+)\.", r"blocks.\2."),
    (r"\.(layernorm_before|layer_norm1)\.", ".norm1."),
    (r"\.(layernorm_after|layer_norm2)\.", ".norm2."),
    (r"^head\.probe$", "attn_pool.latent"),
    (r"^head\.(attention\.)?(out_)?", "attn_pool."),
    (r"\.(attention\.output\.dense|attention\.o_proj|self_attn\.out_proj)\.", ".attn.proj."),
    (r"\.attention\.attention\.relative_position_bias\.", ".attn."),
    (r"\.(attention\.|self_attn\.)+([qkv])(uery|ey|alue|_proj)\.", r".attn.\2."),
    (r"\.(intermediate\.dense|mlp\.weights_in|mlp\.up_proj)\.", ".mlp.fc1."),
    (r"\.(output\.dense|mlp\.weights_out|mlp\.down_proj)\.", ".mlp.fc2."),
    (r"\.(layer_scale|lambda_)([12])(\.lambda1)?$", r".ls\2.gamma"),
    (r"^(attn_pool\.)?(post_)?layernorm\.", r"\1norm."),
    (r"^pooler\.layernorm\.", "fc_norm."),
    (r"^(cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)
FOR_EVA = ((r"\.ls([12])\.gamma$", r".gamma_\1"), (r"\.attn\.([qv])\.bias$", r".attn.\1_bias"))
# Parts that timm stores as one.
JOINED = {("attn.q", "attn.k", "attn.v"): "attn.qkv", ("mlp.gate_proj", "mlp.fc1"): "mlp.fc1"}


def transformers_folder(path: Path) -> Path | None:
    """Return the folder of a model that transformers saved, given the folder or its weights."""
    folder = path.parent if path.name == MODEL_FILE else path
    try:
        about = parse(dict[str, Any], require_file(folder / "config.json").read_bytes(), folder)
    except (OSError, ValueError):
        return None
    is_other = path.is_file() and is_own_file(path)
    return folder if "model_type" in about and not is_other else None


def read_transformers(folder: Path) -> tuple[Pretrained, Preprocess]:
    """Read weights, and how images are prepared for them.

    If our VisionTransformer lacks a part of the model, the settings name a timm model.

    Raises:
        ValueError: The folder is incomplete or damaged, or the model is of another architecture.
    """
    name, notes, classes = str(folder), list[str](), None
    about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = str(about["model_type"]).removesuffix("_vision_model")
    shards = sorted(folder.glob("model-*-of-*.safetensors"))  # of a large one
    files = [*map(require_file, [*folder.glob(MODEL_FILE)] or shards)]
    if kind not in MODEL_TYPES or not files:
        contents = ", ".join(sorted(path.name for path in folder.iterdir()))
        raise ValueError(
            f"model.pretrained: {name} has a transformers model of type {kind} in {contents}; it "
            f"must be of type {', '.join(MODEL_TYPES)}, in model.safetensors, which "
            "model.save_pretrained writes"
        )
    with understood(name):
        labels = about.get("id2label", {})
        about = {**SIGLIP, **about, **about.get("vision_config", {})}
        sides, channels = about.get("image_size", 224), about.get("num_channels", 3)
        input_size = (channels, sides, sides) if isinstance(sides, int) else (channels, *sides)
        stored = {k: v for file in files for k, v in safetensors.torch.load_file(file).items()}
        weights = _rename(stored, RENAMED + (FOR_EVA if kind in ("dinov3_vit", "beit") else ()))
        head = weights.get("head.weight")
        several = about.get("problem_type") not in (None, "single_label_classification")
        why = "reads class token and mean of the patches" if kind.startswith("dinov2") else ""
        if head is not None and (several or len(head) < 2):
            why = "does not choose one of several classes"
        if head is not None and why:
            weights = {key: value for key, value in weights.items() if not key.startswith("head.")}
            notes.append(f"its classifier {why}, so it is left out")
        elif head is not None:
            names = [labels.get(f"{n}", f"class {n}") for n in range(len(head))]
            counts = Counter(names)  # two classes of ImageNet are called crane
            classes = tuple(f"{x} ({n})" if counts[x] > 1 else x for n, x in enumerate(names))
        settings = _settings(weights, kind, about, name)
        preprocess = _preprocess(folder / "preprocessor_config.json", input_size, kind, notes)
    mean, std = preprocess.mean, preprocess.std
    source = Pretrained(name, settings, weights, input_size, mean, std, classes, tuple(notes))
    return source, preprocess


def read_classifier(folder: Path) -> tuple[ModelMetadata, dict[str, Tensor]]:
    """Read a classifier as from a model file: metadata and weights; ValueError without a head."""
    source, preprocess = read_transformers(folder)
    if source.classes is None:
        raise ValueError(
            f"{folder} is not a classifier of one class for each image, with a head of one linear "
            "layer over class token or mean; train a new classifier with --model.pretrained "
            f"{folder}"
        )
    model = adopt(ModelConfig(pretrained=str(folder)), source.settings, str(folder))
    data = DataConfig(name="folder", image_size=preprocess.image_size, channels=preprocess.channels)
    weights = fit(source, model, data.spec).weights
    for note in source.notes:
        warn(f"{folder}: {note}")
    config = Config(data=data, model=model)
    about = ModelMetadata(config=config, classes=source.classes, step=0, preprocess=preprocess)
    return about, weights


def _rename(weights: dict[str, Tensor], names: tuple[tuple[str, str], ...]) -> dict[str, Tensor]:
    """Give weights timm's names, leave out `UNUSED`, and join the parts in `JOINED`."""
    renamed = {}
    for key, value in weights.items():
        for pattern, replacement in names:
            key = re.sub(pattern, replacement, key)
        if value.numel() and not re.search(UNUSED, key):
            renamed[key] = value[None] if key == "pos_embed" and value.ndim == 2 else value
    for parts, whole in JOINED.items():
        first = f"{parts[0]}.weight"
        for block in [key.removesuffix(first) for key in renamed if key.endswith(first)]:
            for kind in ("weight", "bias"):
                keys = [f"{block}{part}.{kind}" for part in parts]
                if tensors := [renamed.pop(key) for key in keys if key in renamed]:
                    renamed[f"{block}{whole}.{kind}"] = torch.cat(tensors)
    for kind in ("weight", "bias"):  # of SigLIP's attention pooling, which timm stores as two
        if (joined := renamed.pop(f"attn_pool.in_proj_{kind}", None)) is not None:
            dim = len(joined) // 3
            renamed |= {f"attn_pool.q.{kind}": joined[:dim], f"attn_pool.kv.{kind}": joined[dim:]}
    return renamed


def _settings(
    weights: dict[str, Tensor], kind: str, about: dict[str, Any], name: str
) -> dict[str, Any]:
    """Return the fields of `ModelConfig` for renamed weights; adapts the weights in place."""
    gated = bool(about.get("use_swiglu_ffn") or about.get("use_gated_mlp"))
    special = {"beit": ["gelu"], "dinov3_vit": ["silu" if gated else "gelu"]}
    act, allowed = about["hidden_act"], special.get(kind, [*ACTIVATIONS])
    if act not in allowed:
        raise ValueError(
            f"model.pretrained: {name} has hidden_act={act}; it must be {' or '.join(allowed)}"
        )
    settings = settings_of_weights(weights, about["num_attention_heads"], name)
    settings |= {NORM_EPS: about["layer_norm_eps"], "global_pool": "token", "no_embed_class": False}
    settings["act_layer"] = "silu" if gated else ACTIVATIONS[act]
    if kind == "dinov3_vit":
        settings["mlp_ratio"] /= 2 if gated else 1  # both parts are joined
        arguments = {key: settings[key] for key in OF_TIMM} | {
            "num_reg_tokens": settings["reg_tokens"], "rope_temperature": about["rope_theta"],
            "qkv_bias": "blocks.0.attn.q_bias" in weights, "swiglu_mlp": gated,
        }  # fmt: skip
        return {"name": "timm:vit_small_patch16_dinov3", "timm_args": arguments}
    if kind == "beit":
        # Masked-image models have no norm of the mean, whatever their config says.
        means = about["use_mean_pooling"] and "fc_norm.weight" in weights
        settings["global_pool"] = "avg" if means else "token"
        arguments = {key: settings[key] for key in OF_TIMM} | {
            "init_values": about["layer_scale_init_value"] or None,
            "use_abs_pos_emb": "pos_embed" in weights,
            "use_rel_pos_bias": about["use_relative_position_bias"],
            "use_shared_rel_pos_bias": about["use_shared_relative_position_bias"],
        }
        return {"name": "timm:beit_base_patch16_224", "timm_args": arguments}
    if kind == "dinov2_with_registers":  # which have no positions
        settings["no_embed_class"] = True
        weights["cls_token"] = weights["cls_token"] + weights["pos_embed"][:, :1]
        weights["pos_embed"] = weights["pos_embed"][:, 1:]
    if gated:  # unlike our MLP
        settings["name"] = "timm:vit_giant_patch14_dinov2"
    if "head_dist.weight" in weights:
        settings |= {"name": "timm:deit_base_distilled_patch16_224", "reg_tokens": 0}
        weights["dist_token"] = weights.pop("reg_token")
    if kind == "siglip":
        settings["global_pool"] = "avg"  # of a classifier, or without attention pooling
        pool = {key: weights.pop(key) for key in [*weights] if key.startswith("attn_pool.")}
        if pool and "head.weight" not in weights:
            settings |= {"name": "timm:vit_base_patch16_siglip_224", "global_pool": "map"}
            weights |= pool
    return settings


def _preprocess(path: Path, input_size: tuple[int, ...], kind: str, notes: list[str]) -> Preprocess:
    """Read how images are prepared; without a file, use the defaults of this kind of model."""
    channels, height, width = input_size
    usual = IMAGENET if channels == 3 and kind in OF_IMAGENET else [[0.5] * channels] * 2
    about: dict[str, Any] = {"size": {"height": height, "width": width}, "resample": 3}
    about["image_mean"], about["image_std"] = usual
    nested = path.with_name("processor_config.json")  # with that of texts
    if path.is_file():
        about |= json.loads(path.read_text(encoding="utf-8"))
    elif nested.is_file():
        about |= json.loads(nested.read_text(encoding="utf-8"))["image_processor"]
    else:
        values = "those of ImageNet" if usual is IMAGENET else "0.5"
        notes.append(
            f"not in the folder: {path.name}; as usual for {kind}, mean and std are {values}"
        )
    if not about.get("do_normalize", True):
        about |= {"image_mean": [0.0] * channels, "image_std": [1.0] * channels}
    scale = 255 * about.get("rescale_factor", 1 / 255)
    mean, std = (tuple(value / scale for value in about[f"image_{x}"]) for x in ("mean", "std"))
    resized = _sides(about["size"])
    size = _sides(about["crop_size"]) if about.get("do_center_crop") else resized
    interpolation = Image.Resampling(about["resample"]).name.lower()
    crop_pct = math.nextafter(size[0] / resized[0], 0)  # quotients by it are rounded down
    crops = "shortest_edge" in str(about["size"])
    return Preprocess(size, mean, std, interpolation, "crop" if crops else "squash", crop_pct)


def _sides(size: Any) -> tuple[int, int]:
    """Return height and width; one number, or the shortest edge of a photo, is both."""
    edge = size if isinstance(size, int) else size.get("shortest_edge")
    return (edge, edge) if edge else (size["height"], size["width"])
