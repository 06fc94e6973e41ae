"""Sanity checks of maps: do they depend on what the model has learned, and on nothing else?

A map that explains a model changes when the weights of the model are replaced by random ones
(arXiv 1810.03292), and does not change when inputs are shifted by a constant that the model
subtracts (arXiv 1711.00867).

Shapes: B images, C classes.
"""

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from scipy.stats import rankdata
from torch import Tensor, nn

from vit.classifier import Classifier
from vit.data.images import ImageSet
from vit.model.attention_model import require_attention
from vit.seeding import generator

HEAD = ("head", "norm.", "fc_norm.", "attn_pool.")  # prefixes of the names of its weights


def rank_correlation(maps: Tensor, others: Tensor) -> Tensor:
    """Compute Spearman's rank correlation between two maps (B, rows, columns) of each image.

    Returns:
        (B,) float64, -1 to 1; 0 if all values of a map are equal.
    """
    one, other = (
        torch.from_numpy(rankdata(values.flatten(1).cpu(), axis=1)) for values in (maps, others)
    )
    centre = (1 + one.shape[1]) / 2
    return F.cosine_similarity(one - centre, other - centre, dim=1, eps=1e-30)


def accuracy(classifier: Classifier, images: ImageSet, labels: Tensor) -> float:
    """Return the fraction of images that are predicted as labels (B,) say."""
    predicted = classifier.logits(images.pixels()).argmax(dim=1).cpu()
    return (predicted == labels.cpu()).double().mean().item()


def stages(model: nn.Module) -> dict[str, list[str]]:
    """Group the names of the weights of a model, ours or timm's, from the output to the input.

    Returns:
        Names in the state dict by stage: "head" (with the last norm), "block L-1" to "block 0" and
        "stem" (with position embeddings and prefix tokens).
    """
    depth = len(require_attention(model).blocks)
    prefixes = {"head": HEAD} | {f"block {n}": (f"blocks.{n}.",) for n in reversed(range(depth))}
    names = list(model.state_dict())
    found = {
        stage: [name for name in names if name.startswith(prefix)]
        for stage, prefix in prefixes.items()
    }
    known = {name for group in found.values() for name in group}
    return found | {"stem": [name for name in names if name not in known]}


def cascade(model: nn.Module, weights: dict[str, Tensor]) -> Iterator[tuple[str, nn.Module]]:
    """Replace the weights of a model by others stage by stage, from the output to the input.

    Yields:
        Each stage, see `stages`, and a copy of the model in which the weights of this and all
        earlier stages are replaced.
    """
    state = model.state_dict()
    for stage, names in stages(model).items():
        state = state | {name: weights[name] for name in names}
        changed = copy.deepcopy(model)
        changed.load_state_dict(state)
        yield stage, changed


def shuffled_weights(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return the weights of a model with the values of each tensor in random order.

    Unlike those of an untrained model, they keep the scale that they have learned.
    """
    shuffled = {}
    for name, values in model.state_dict().items():
        order = torch.randperm(values.numel(), generator=generator(seed, "shuffle", name))
        shuffled[name] = values.flatten()[order.to(values.device)].view_as(values)
    return shuffled


@torch.no_grad()
def for_shifted_inputs(model: nn.Module, shift: float) -> nn.Module:
    """Return a copy of a model that gives the same logits for inputs to which a shift is added.

    It subtracts, in the bias of the patch embedding, what the shift adds to the tokens.

    Raises:
        ValueError: The patch embedding is not linear or has no bias.
    """
    changed = copy.deepcopy(model)
    projection = getattr(changed.patch_embed, "proj", None)
    if not isinstance(projection, nn.Conv2d | nn.Linear) or projection.bias is None:
        raise ValueError("model.stem: inputs can only be shifted with stem=linear that has a bias")
    projection.bias -= shift * projection.weight.flatten(1).sum(dim=1)
    return changed
