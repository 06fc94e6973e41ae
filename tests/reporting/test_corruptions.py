"""Corruptions against independent references in NumPy, SciPy and Pillow, and their report."""

import colorsys
import copy
import io
import math
import pickle
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage, stats
from torch import Tensor

from models import grey_classifier
from small_runs import Payload
from vit.classifier import Classifier
from vit.data.corruptions import corrupt, parameters
from vit.data.images import ImageSet
from vit.data.severities import CORRUPTIONS
from vit.intervals import wilson_interval
from vit.reporting.corruptions import (
    SEVERITIES,
    classify_corrupted,
    compare_corrupted,
    report_corruptions,
    summarize,
)
from vit.seeding import fold_in, generator

Rng = np.random.Generator


def photos(count: int, channels: int, height: int, width: int) -> Tensor:
    """Draw smooth images with edges, from black to white."""
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=(count, channels, height, width))
    smooth = ndimage.gaussian_filter(drawn, (0, 0, 3, 3))
    smooth = (smooth - smooth.min()) / (smooth.max() - smooth.min())
    smooth[..., height // 3 : height // 2, width // 4 :] = 1
    smooth[..., height // 2 :, : width // 3] *= 0.2
    return torch.from_numpy((255 * smooth).astype(np.uint8))


# The references work on one image (H, W, channels) of 0 to 1 and return one of 0 to 255.


def blurred(image: np.ndarray, sigma: float) -> np.ndarray:
    return ndimage.gaussian_filter(image, (sigma, sigma, 0), mode="nearest", truncate=4)


def zoomed(image: np.ndarray, factor: float) -> np.ndarray:
    size = len(image)
    kept = math.ceil(round(size / factor, 6))
    top = (size - kept) // 2
    large = ndimage.zoom(image[top : top + kept, top : top + kept], (factor, factor, 1), order=1)
    top = (len(large) - size) // 2
    return large[top : top + size, top : top + size]


def moved(image: np.ndarray, radius: float, sigma: float, degrees: float) -> np.ndarray:
    rows, columns = np.mgrid[: len(image), : len(image)]
    total, weights = np.zeros_like(image), 0.0
    for step in range(2 * math.ceil(radius) + 1):
        weight, angle = stats.norm.pdf(step, scale=sigma), math.radians(degrees)
        down = rows + math.ceil(step * math.sin(angle) - 0.5)
        across = columns + math.ceil(step * math.cos(angle) - 0.5)
        total += weight * image[down.clip(0, len(image) - 1), across.clip(0, len(image) - 1)]
        weights += weight
    return np.floor(255 * total / weights + 1e-6) / 255


def gaussian_noise(image: np.ndarray, rng: Rng, scale: float) -> np.ndarray:
    drawn = rng.normal(size=(image.shape[2], *image.shape[:2])).transpose(1, 2, 0)
    return 255 * (image + scale * drawn)


def defocus_blur(image: np.ndarray, rng: Rng, radius: float, sigma: float) -> np.ndarray:
    reach, soft = (8, 1) if radius <= 8 else (math.ceil(radius), 2)
    down, across = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    disk = (down**2 + across**2 <= radius**2).astype(float)
    disk = ndimage.gaussian_filter(disk / disk.sum(), sigma, mode="mirror", radius=soft)
    return 255 * ndimage.convolve(image, disk[..., None], mode="mirror")


def glass_blur(
    image: np.ndarray, rng: Rng, sigma: float, reach: float, rounds: float
) -> np.ndarray:
    image = np.floor(255 * blurred(image, sigma) + 1e-6) / 255
    size, reach = len(image), round(reach)
    for _ in range(round(rounds)):
        inside = range(reach + 1, min(size, size - reach + 1))
        across, down = rng.integers(-reach, reach, (2, len(inside), len(inside)))
        for i, row in reversed([*enumerate(inside)]):
            for j, column in reversed([*enumerate(inside)]):
                image[row, column] = image[row + down[i, j], column + across[i, j]]
    return 255 * blurred(image, sigma)


def motion_blur(image: np.ndarray, rng: Rng, radius: float, sigma: float) -> np.ndarray:
    return 255 * moved(image, radius, sigma, 90 * rng.random() - 45)


def zoom_blur(image: np.ndarray, rng: Rng, count: float, largest: float) -> np.ndarray:
    step = (largest - 1) / (count - 1) + 1e-12
    enlarged = [zoomed(image, 1 + number * step) for number in range(int(count))]
    return 255 * np.mean([image, *enlarged], axis=0)


def snow(image: np.ndarray, rng: Rng, *values: float) -> np.ndarray:
    mean, scale, zoom, threshold, radius, sigma, kept = values
    flakes = mean + scale * rng.normal(size=(*image.shape[:2], 1))
    flakes = zoomed(flakes, zoom)
    flakes = np.floor(255 * np.where(flakes < threshold, 0, flakes).clip(0, 1) + 1e-6) / 255
    flakes = moved(flakes, radius, sigma, 90 * rng.random() - 135)
    grey = image @ [0.299, 0.587, 0.114] if image.shape[2] == 3 else image.mean(axis=2)
    white = np.maximum(image, 1.5 * grey[..., None] + 0.5)
    return 255 * (kept * image + (1 - kept) * white + flakes + flakes[::-1, ::-1])


def fog(image: np.ndarray, rng: Rng, amount: float, decay: float) -> np.ndarray:
    size = 2 ** math.ceil(math.log2(len(image)))
    field, step, height = np.zeros((size, size)), size // 2, 1.0
    rows, columns = np.indices((size, size))
    while step:
        drawn = np.zeros((size, size))
        drawn[::step, ::step] = rng.uniform(-1, 1, (size // step, size // step))
        on_grid = (rows % step == 0) & (columns % step == 0)
        odd = rows // step % 2 + columns // step % 2
        diagonal = [(-step, -step), (-step, step), (step, -step), (step, step)]
        straight = [(-step, 0), (step, 0), (0, -step), (0, step)]
        for kind, around in ((2, diagonal), (1, straight)):  # centres of squares, then of edges
            near = sum(np.roll(field, shift, (0, 1)) for shift in around) / 4
            field = np.where(on_grid & (odd == kind), near + height**2 * drawn, field)
        step, height = step // 2, height / decay
    field = (field - field.min()) / (field.max() - field.min())
    fogged = image + amount * field[: len(image), : len(image), None]
    return 255 * fogged * image.max() / (image.max() + amount)


def brightness(image: np.ndarray, rng: Rng, amount: float) -> np.ndarray:
    if image.shape[2] == 1:
        return 255 * (image + amount)
    colours = np.array([colorsys.rgb_to_hsv(*pixel) for pixel in image.reshape(-1, 3)])
    colours[:, 2] = (colours[:, 2] + amount).clip(0, 1)
    return 255 * np.array([colorsys.hsv_to_rgb(*colour) for colour in colours]).reshape(image.shape)


def contrast(image: np.ndarray, rng: Rng, factor: float) -> np.ndarray:
    mean = image.mean(axis=(0, 1))
    return 255 * (mean + factor * (image - mean))


def sampled(image: np.ndarray, down: np.ndarray, across: np.ndarray, mode: str) -> np.ndarray:
    planes = image.transpose(2, 0, 1)
    found = [ndimage.map_coordinates(p, [down, across], order=1, mode=mode) for p in planes]
    return np.stack(found, axis=-1)


def elastic(image: np.ndarray, rng: Rng, length: float, sigma: float, shift: float) -> np.ndarray:
    size, middle, third = len(image), len(image) // 2, len(image) // 3
    corners = middle + third * np.array([[1, 1], [1, -1], [-1, -1]])
    there = corners + shift * size * rng.uniform(-1, 1, (3, 2))[:, ::-1]
    back = np.linalg.solve(np.c_[there, np.ones(3)], corners)
    rows, columns = np.mgrid[:size, :size]
    across, down = np.moveaxis(np.stack([columns, rows, np.ones_like(rows)], -1) @ back, -1, 0)
    image = sampled(image, down, across, "mirror")
    bends = rng.uniform(-1, 1, (2, size, size))
    if sigma:
        bends = ndimage.gaussian_filter(
            bends, (0, sigma * size, sigma * size), mode="reflect", truncate=3
        )
    down, across = rows + length * size * bends[0], columns + length * size * bends[1]
    return 255 * sampled(image, down, across, "reflect")


def pixelate(image: np.ndarray, rng: Rng, fraction: float) -> np.ndarray:
    small, large = (int(fraction * len(image)),) * 2, (len(image),) * 2
    photo = pillow(image).resize(small, Image.Resampling.BOX).resize(large, Image.Resampling.BOX)
    return np.array(photo).reshape(image.shape)


def jpeg(image: np.ndarray, rng: Rng, quality: float) -> np.ndarray:
    file = io.BytesIO()
    pillow(image).save(file, "JPEG", quality=int(quality))
    return np.array(Image.open(file)).reshape(image.shape)


def pillow(image: np.ndarray) -> Image.Image:
    return Image.fromarray((255 * image).round().astype(np.uint8).squeeze())


REFERENCES = (
    gaussian_noise, defocus_blur, glass_blur, motion_blur, zoom_blur, snow, fog, brightness,
    contrast, elastic, pixelate, jpeg,
)  # fmt: skip


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("size", "channels", "severities"), [(32, 3, SEVERITIES), (32, 1, (3,)), (224, 3, (1, 5))]
)
def test_corruptions_agree_with_references(reference, size, channels, severities):
    """With the same random numbers, to one level of 255 (rounding), at both published sizes."""
    kind = reference.__name__
    image = photos(1, channels, size, size)
    for severity in severities:
        rng = np.random.default_rng(fold_in(0, kind, zlib.crc32(image[0].numpy())))
        entry = CORRUPTIONS[kind]
        rows = entry.at_32 if size == 32 else entry.at_224
        clean = image[0].permute(1, 2, 0).numpy() / 255
        expected = reference(clean, rng, *(row[severity - 1] for row in rows)).clip(0, 255)
        found = corrupt(image, kind, severity)[0].permute(1, 2, 0).numpy()
        difference = np.abs(found - np.floor(expected + 1e-6))
        assert difference.max() <= 1
        assert difference.mean() < 0.05  # where the exact value is a whole level


def test_noise_has_the_statistics_of_its_distribution():
    """For grey 0.4: shot noise is Poisson, and impulses are black or white equally often."""
    image = torch.full((1, 3, 224, 224), 102, dtype=torch.uint8)
    photons = parameters("shot_noise", 1, 224)[0]
    counts = (photons * corrupt(image, "shot_noise", 1).double() / 255).round().long()
    observed = torch.bincount(counts.flatten())[: int(photons)]  # white values are cut off
    expected = counts.numel() * stats.poisson.pmf(np.arange(len(observed)), 0.4 * photons)
    often = expected > 20
    observed, expected = observed.numpy()[often], expected[often]
    scale = observed.sum() / expected.sum()
    assert stats.chisquare(observed, scale * expected).pvalue > 1e-4
    impulses = corrupt(image, "impulse_noise", 5)
    for value in (0, 255):
        low, high = stats.binom(impulses.numel(), 0.27 / 2).ppf([1e-5, 1 - 1e-5])
        assert low <= (impulses == value).sum() <= high


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_corruptions_depend_on_the_image_alone_and_grow_with_severity(kind):
    """Not on the batch, its order or other images; and on the seed where they are random."""
    images = photos(5, 3, 32, 32)
    found = corrupt(images, kind, 4, seed=3)
    for part in ([3], [1, 4], [2, 0]):
        assert torch.equal(corrupt(images[part], kind, 4, seed=3), found[part])
    same = torch.equal(corrupt(images, kind, 4, seed=4), found)
    fixed = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg")
    assert same == (kind in fixed)
    for shape in ((1, 8, 8), (4, 40, 64), (3, 96, 50), (2, 1, 3)):
        images = photos(2, *shape)
        found = [corrupt(images, kind, severity) for severity in (1, 5)]
        assert {(each.shape, each.dtype) for each in found} == {(images.shape, torch.uint8)}
        far = [(each.double() - images).abs().mean() for each in found]
        if min(shape[1:]) > 30 and kind != "elastic":  # whose published lengths do not grow
            assert 0 < far[0] < far[1]


def test_parameters_lie_between_the_published_ones():
    assert parameters("jpeg", 2, 8) == parameters("jpeg", 2, 32) == [65]
    assert parameters("jpeg", 2, 500) == parameters("jpeg", 2, 224) == [18]
    middle = round(math.sqrt(32 * 224))
    assert parameters("jpeg", 2, middle)[0] == pytest.approx((65 + 18) / 2, abs=0.2)


def correlated(count: int) -> dict[str, Tensor]:
    """Draw hits of a model that fails on the same images again and again."""
    rng = torch.Generator().manual_seed(0)
    skill = torch.rand(count, generator=rng)
    found = {"clean": torch.rand(1, count, generator=rng) < 0.3 + 0.7 * skill}
    return found | {kind: torch.rand(5, count, generator=rng) < skill for kind in CORRUPTIONS}


def test_intervals_agree_with_the_bootstrap_over_images():
    correct = correlated(1000)
    found = summarize(correct)
    rng = np.random.default_rng(0)
    means = torch.cat([correct[kind] for kind in CORRUPTIONS]).double().mean(dim=0).numpy()
    chosen = rng.integers(1000, size=(4000, 1000))
    resampled = means[chosen].mean(axis=1)
    relative = resampled / correct["clean"][0].numpy()[chosen].mean(axis=1)
    for name, values in (("mean", resampled), ("relative", relative)):
        low, high = np.quantile(values, [0.025, 0.975])
        assert found[f"{name}_95"] == pytest.approx((low, high), abs=0.15 * (high - low))
    one = found["kinds"]["fog"]
    hits = int(correct["fog"][1].sum())
    assert one["accuracy_95"][1] == pytest.approx(wilson_interval(hits, 1000), abs=1e-9)
    # Without a single hit there is no ratio.
    found = summarize({key: torch.zeros_like(value) for key, value in correlated(10).items()})
    assert found["relative"] is found["relative_95"] is None
    assert found["mean_95"] == wilson_interval(0, 10)


KINDS = ("shot_noise", "glass_blur", "fog", "jpeg")


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> Classifier:
    few = {kind: CORRUPTIONS[kind] for kind in KINDS}  # a kind of each group, to be quick
    monkeypatch.setattr("vit.reporting.corruptions.CORRUPTIONS", few)
    return grey_classifier()


@pytest.fixture
def images() -> ImageSet:
    return ImageSet(photos(7, 1, 16, 24), torch.tensor([0, 1, 2, 0, 1, 2, 0]), ("a", "b", "c"))


def test_report_has_every_kind(saved, images, tmp_path):
    """In the table, TensorBoard and two pictures."""
    part = report_corruptions(saved, images, tmp_path, seed=0, batch_size=3)
    stored = part.numbers
    assert [line.split("  ")[0] for line in part.table.splitlines()[1:]] == [
        *(kind.replace("_", " ") for kind in KINDS), "mean",
    ]  # fmt: skip
    assert all(picture.std() > 1 for picture in part.pictures.values())
    assert part.scalars == {
        "corrupted_accuracy": stored["mean"],
        **{f"corruptions/{kind}": row["mean"] for kind, row in stored["kinds"].items()},
    }


def test_models_are_compared_by_image_with_the_same_corruptions(saved, images, tmp_path):
    one, other = saved, copy.deepcopy(saved)
    torch.nn.init.normal_(other.model.head.weight, std=3, generator=generator(1, "other"))
    models = {"one": (one, images), "other": (other, images), "same": (one, images)}
    found, table = compare_corrupted(models, tmp_path, seed=0, batch_size=500)
    hits = [
        classify_corrupted(classifier, images, tmp_path / f"{number}.npz")
        for number, classifier in enumerate((one, other))
    ]
    lines = {line[2:12].strip(): line for line in table.splitlines()}
    for kind in KINDS:
        first, second = (part[kind].double().mean(dim=0).numpy() for part in hits)
        row = found["other"][kind]
        assert (found["one"][kind]["mean"], row["mean"]) == (
            pytest.approx(first.mean()), pytest.approx(second.mean())
        )  # fmt: skip
        half = stats.t.ppf(0.975, len(images) - 1) * stats.sem(second - first)
        mean = (second - first).mean()
        assert row["difference_95"] == pytest.approx((mean - half, mean + half), abs=1e-5)
        assert found["same"][kind]["difference_95"] == (0, 0)
        assert f"{row['difference']:+.1%} (" in lines[kind.replace("_", " ")[:12].strip()]
    means = [found["other"][kind]["difference"] for kind in KINDS]
    assert found["other"]["mean"]["difference"] == pytest.approx(np.mean(means))


def test_an_interrupted_report_continues(saved, images, tmp_path, monkeypatch):
    """Finished kinds are not computed again, unless the seed or the images differ."""
    path, done, interrupted = tmp_path / "corruptions.npz", set(), True
    whole = classify_corrupted(saved, images, tmp_path / "whole.npz", batch_size=4)

    def counted(part: Tensor, kind: str, severity: int, seed: int) -> Tensor:
        if kind == "fog" and interrupted:
            raise KeyboardInterrupt
        done.add(kind)
        return corrupt(part, kind, severity, seed)

    monkeypatch.setattr("vit.data.corruptions.corrupt", counted)
    with pytest.raises(KeyboardInterrupt):
        classify_corrupted(saved, images, path, batch_size=4)
    interrupted, before, all_kinds = False, {*KINDS[:2]}, {*KINDS}
    assert done == before
    corrected = replace(images, labels=images.labels.roll(1))
    for seed, chosen, expected in (
        (0, images, all_kinds - before), (0, images, set()), (1, images, all_kinds),
        (1, images.select(torch.arange(6)), all_kinds), (1, corrected, all_kinds),
    ):  # fmt: skip
        done.clear()
        found = classify_corrupted(saved, chosen, path, seed, batch_size=4)
        assert done == expected
        if seed == 0:
            assert all(torch.equal(found[key], whole[key]) for key in whole)


def test_a_damaged_file_of_results_is_measured_again(saved, images, tmp_path, monkeypatch):
    """It is only a cache, so nothing in it is used or executed, and a whole file replaces it."""
    path, executed, done = tmp_path / "corruptions.npz", tmp_path / "executed", []
    whole = classify_corrupted(saved, images, path)
    written = path.read_bytes()
    good = dict(np.load(path))

    def npz(changes: dict[str, object], without: tuple[str, ...] = ()) -> bytes:
        arrays = {key: value for key, value in {**good, **changes}.items() if key not in without}
        np.savez_compressed(file := io.BytesIO(), **arrays)
        return file.getvalue()

    def counted(part: Tensor, kind: str, severity: int, seed: int) -> Tensor:
        done.append(kind)
        return corrupt(part, kind, severity, seed)

    damaged = {
        "cut short": written[: len(written) // 2],
        "a pickle": pickle.dumps(Payload(executed)),
        "no settings": npz({}, without=("settings",)),
        "other settings": npz({"settings": "seed 1"}),
        "settings of another shape": npz({"settings": np.array([good["settings"]] * 2)}),
        "pickled settings": npz({"settings": np.array(Payload(executed))}),
        "an unknown kind": npz({"mist": good["fog"]}),
        "another type": npz({"fog": good["fog"].astype(np.uint8)}),
        "fewer images": npz({"fog": good["fog"][:, 1:]}),
        "many zeros": npz({"fog": np.zeros(10**7, dtype=bool)}),
    }
    monkeypatch.setattr("vit.data.corruptions.corrupt", counted)
    for what, content in damaged.items():
        path.write_bytes(content)
        done.clear()
        found = classify_corrupted(saved, images, path)
        assert {*done} == {*KINDS}, what
        assert found.keys() == whole.keys(), what
        assert all(torch.equal(found[key], whole[key]) for key in whole), what
        assert path.read_bytes() == written, what
    assert not executed.exists()
