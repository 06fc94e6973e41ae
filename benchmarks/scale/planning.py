"""What the GPUs of a run keep in memory, send, and wait for; see plan.py."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from benchmarks.scale.tracing import Activations
from vit.model.vit import VisionTransformer
from vit.training.config import Config

FLOAT32, BFLOAT16 = 4, 2  # bytes

PhaseName = Literal["forward", "backward", "last", "update"]  # last: backward, last micro-batch


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a run.

    Attributes:
        gpus: GPUs on all hosts.
        hosts: Hosts, which have equally many GPUs each.
        parallel: "replicate" copies the model to every GPU, "shard" divides it among all of them,
            "hybrid" among those of a host.
    """

    gpus: int
    hosts: int
    parallel: Literal["replicate", "shard", "hybrid"]

    @property
    def shards(self) -> int:
        """Number of GPUs that a copy of the model is divided among."""
        sizes = {"replicate": 1, "shard": self.gpus, "hybrid": self.gpus // self.hosts}
        return sizes[self.parallel]


@dataclass(frozen=True)
class Transfer:
    """What a collective operation exchanges in one step.

    Attributes:
        name: What it is for.
        kind: The operation.
        payload: Bytes of the whole tensors, with padding: what is gathered, or what each GPU brings
            to a reduction.
        gpus: Number of GPUs that take part.
        hosts: Number of hosts that they are on.
        phase: Part of the step.
    """

    name: str
    kind: Literal["all_gather", "reduce_scatter", "all_reduce"]
    payload: int
    gpus: int
    hosts: int
    phase: PhaseName

    @property
    def sent(self) -> float:
        """Bytes that each GPU sends in a ring."""
        return (1 + (self.kind == "all_reduce")) * (self.gpus - 1) / self.gpus * self.payload

    @property
    def between(self) -> float:
        """Bytes that a GPU sends to other hosts: rings leave a host by a different GPU each."""
        return self.sent * self.hosts / self.gpus if self.hosts > 1 else 0.0

    @property
    def within(self) -> float:
        """Bytes that a GPU sends to others on its host."""
        return self.sent - self.between


@dataclass(frozen=True)
class Phase:
    """A part of a step, in seconds."""

    name: PhaseName
    computing: float
    within: float
    between: float

    @property
    def sending(self) -> float:
        """Seconds on the slower of the links, which are used at the same time."""
        return max(self.within, self.between)

    @property
    def seconds(self) -> float:
        """Duration: nothing hides what is sent for the update of the weights."""
        both = (self.computing, self.sending)
        return sum(both) if self.name == "update" else max(both)


def shard_size(parameters: Iterable[nn.Parameter], shards: int) -> int:
    """Return how many numbers the largest shard of some parameters has.

    FSDP divides the first dimension of each parameter, and pads it to a multiple of shards.
    """
    return sum(-(-len(p) // shards) * (p.numel() // len(p)) for p in parameters)


def parts(model: VisionTransformer) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
    """Return the parameters of each block, and those outside of blocks; each part is gathered."""
    blocks = [list(block.parameters()) for block in model.blocks]
    inner = {id(parameter) for block in blocks for parameter in block}
    return blocks, [parameter for parameter in model.parameters() if id(parameter) not in inner]


def transfers(
    model: VisionTransformer, cluster: Cluster, accumulate: int, muon: list[nn.Parameter]
) -> list[Transfer]:
    """List what the GPUs exchange in one step, apart from single numbers.

    Args:
        model: On the meta device.
        cluster: The GPUs.
        accumulate: Number of micro-batches.
        muon: The parameters that Muon updates.
    """
    shards, gpus, hosts = cluster.shards, cluster.gpus, cluster.hosts
    everything = list(model.parameters())
    if cluster.parallel == "replicate":
        sent = FLOAT32 * _count(everything)
        updates = BFLOAT16 * _count(muon)
        return [
            Transfer("average gradients", "all_reduce", sent, gpus, hosts, "last"),
            Transfer("share Muon's updates", "all_reduce", updates, gpus, hosts, "update"),
        ]
    blocks, _ = parts(model)
    whole = shards * shard_size(everything, shards)
    of_blocks = sum(shards * shard_size(block, shards) for block in blocks)
    of_forward = BFLOAT16 * of_blocks + FLOAT32 * (whole - of_blocks)
    of_muon = shards * shard_size(muon, shards)
    across = 1 if cluster.parallel == "hybrid" else hosts

    def gather(name: str, sent: int, phase: PhaseName) -> Transfer:
        """Describe a gathering within the GPUs that share a copy of the model."""
        return Transfer(name, "all_gather", sent, shards, across, phase)

    of_shard = FLOAT32 * shard_size(everything, shards)
    copies = gpus // shards
    return [
        gather("gather weights, forward", of_forward * accumulate, "forward"),
        gather("gather weights, backward", BFLOAT16 * of_blocks * (accumulate - 1), "backward"),
        gather("gather weights, backward", BFLOAT16 * of_blocks, "last"),
        Transfer(
            "reduce gradients to shards", "reduce_scatter", FLOAT32 * whole, shards, across, "last"
        ),
        Transfer("average shards of gradients", "all_reduce", of_shard, copies, hosts, "last"),
        gather("gather Muon's gradients", BFLOAT16 * of_muon, "update"),
        Transfer(
            "share Muon's updates", "all_reduce", BFLOAT16 * _count(muon), gpus, hosts, "update"
        ),
    ]


def memory(
    model: VisionTransformer,
    config: Config,
    cluster: Cluster,
    activations: Activations,
    muon: list[nn.Parameter],
) -> dict[str, float]:
    """Return the bytes in a GPU's memory by what they are for.

    Args:
        model: On the meta device.
        config: The run.
        cluster: The GPUs.
        activations: Bytes that autograd saves.
        muon: The parameters that Muon updates.
    """
    train, spec = config.train, config.data.spec
    everything = list(model.parameters())
    own, own_muon = (shard_size(some, cluster.shards) for some in (everything, muon))
    images = train.batch_size / cluster.gpus
    kept = activations.checkpointed if train.checkpoint_blocks else activations.stored
    rows: dict[str, float] = {
        "weights (float32)": FLOAT32 * own,
        "gradients (float32)": FLOAT32 * own,
        "optimizer (float32)": FLOAT32 * (2 * (own - own_muon) + own_muon),
        "moving average (float32)": FLOAT32 * own * (config.optim.ema_decay is not None),
    }
    if cluster.parallel == "replicate":
        rows["bfloat16 copies of the weights"] = activations.casts
    else:
        blocks, root = parts(model)
        block = cluster.shards * max(shard_size(block, cluster.shards) for block in blocks)
        outside = cluster.shards * shard_size(root, cluster.shards)
        # FSDP gathers the next block while one is computed, and reduces gradients in float32.
        rows["gathered weights"] = FLOAT32 * outside + BFLOAT16 * 2 * block
        rows["gradients that are being sent"] = (BFLOAT16 + FLOAT32) * block
        undivided = FLOAT32 * _count(everything) * (train.accumulate > 1)
        rows["gradients of micro-batches (float32)"] = undivided
    rows["activations"] = kept * images / train.accumulate
    size = spec.channels * spec.image_size[0] * spec.image_size[1]
    rows["images (uint8 and float32)"] = (1 + FLOAT32) * size * images
    return {name: value for name, value in rows.items() if value}


def phases(
    passes: tuple[float, float],
    update: float,
    exchanged: list[Transfer],
    accumulate: int,
    within: float,
    between: float,
) -> list[Phase]:
    """Estimate the duration of the parts of a step.

    Args:
        passes: Seconds that a GPU computes in the forward and the backward pass.
        update: Seconds that it computes in the update of the weights, apart from AdamW.
        exchanged: What is sent.
        accumulate: Number of micro-batches.
        within: Bytes/s that a GPU sends to others on its host.
        between: Bytes/s that it sends to other hosts.
    """
    forward, backward = passes
    computing: dict[PhaseName, float] = {
        "forward": forward,
        "backward": backward * (accumulate - 1) / accumulate,
        "last": backward / accumulate,
        "update": update,
    }
    return [
        Phase(
            name,
            seconds,
            sum(one.within for one in exchanged if one.phase == name) / within,
            sum(one.between for one in exchanged if one.phase == name) / between,
        )
        for name, seconds in computing.items()
    ]


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
