"""Preprocessing of images of any size, and image files: colours, bands, transparency, damage."""

import dataclasses
import io
import itertools
import json
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, ExifTags, Image, ImageOps, UnidentifiedImageError
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

import vit.data.pixels
from small_runs import load
from vit.data.config import DataConfig
from vit.data.photos import to_photo
from vit.data.pixels import FORMATS, LONGEST
from vit.data.preprocess import Preprocess

CIFAR10 = Preprocess.from_config(DataConfig(name="cifar10"))
with_fits = pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
BICUBIC = v2.InterpolationMode.BICUBIC
PHOTOS = [(333, 500), (500, 333), (101, 40), (7, 5), (1, 1), (31, 33), (20, 300), (1, 40)]


def photo(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=(height, width, channels), dtype=np.uint8)


def by_torchvision(pixels: np.ndarray, *transforms: v2.Transform) -> torch.Tensor:
    return v2.Compose([*transforms, v2.PILToTensor()])(Image.fromarray(pixels))


def test_the_config_sets_it_and_files_without_the_newer_fields_are_read():
    data = DataConfig(name="folder", image_size=(64, 96), fit="pad", channels=5)
    preprocess = Preprocess.from_config(data)
    assert (preprocess.image_size, preprocess.fit) == ((64, 96), "pad")
    assert (preprocess.mean, preprocess.std) == ((0.5,) * 5, (0.25,) * 5)
    grey = Preprocess.from_config(DataConfig(name="folder", channels=1))
    assert (grey.mean, grey.std) == ((0.449,), (0.226,))  # ImageNet's, averaged

    again = Preprocess(**json.loads(json.dumps(vars(preprocess))))
    assert again == preprocess and hash(again) == hash(preprocess)
    old = {key: vars(CIFAR10)[key] for key in ("image_size", "mean", "std", "interpolation")}
    assert Preprocess(**old) == CIFAR10


# torchvision is the oracle, to the bit.


TARGETS = [(32, 32), (64, 96), (15, 31)]


@pytest.mark.parametrize("size", PHOTOS)
def test_crop_is_torchvisions_resize_and_center_crop(size):
    """The photo is resized to the smallest size that covers the frame."""
    pixels = photo(*size)
    for target, crop_pct in zip(TARGETS, (1.0, 0.9, 0.875), strict=True):
        frame = [int(n / crop_pct) for n in target]
        sizes = (tv.resize(torch.empty(1, *size), [n]).shape[1:] for n in range(1, 1000))
        side = 1 + next(n for n, (h, w) in enumerate(sizes) if h >= frame[0] and w >= frame[1])
        expected = by_torchvision(pixels, v2.Resize(side, BICUBIC), v2.CenterCrop(target))
        wanted = dataclasses.replace(CIFAR10, image_size=target, crop_pct=crop_pct)
        assert torch.equal(wanted.resize(pixels), expected)


@pytest.mark.parametrize("size", PHOTOS[:-1])  # torchvision refuses to shrink a side to 0
def test_pad_is_torchvisions_resize_and_pad(size):
    pixels, tiny = photo(*size), torch.empty(1, *size)
    for target in TARGETS:
        wanted = dataclasses.replace(CIFAR10, image_size=target, fit="pad")
        sizes = (tv.resize(tiny, None, max_size=n).shape[1:] for n in range(96, 0, -1))
        height, width = next((h, w) for h, w in sizes if h <= target[0] and w <= target[1])
        top, left = (target[0] - height) // 2, (target[1] - width) // 2
        margins = [left, top, target[1] - width - left, target[0] - height - top]
        resize = v2.Resize(None, BICUBIC, max_size=max(height, width))
        expected = by_torchvision(pixels, resize, v2.Pad(margins, wanted.fill))
        assert torch.equal(wanted.resize(pixels), expected)
    fill = torch.tensor(wanted.fill, dtype=torch.uint8)[None, :, None, None]
    assert wanted.normalize(fill).abs().max() < 0.01  # the mean colour


def test_squash_is_torchvisions_resize_to_both_sides():
    wanted = dataclasses.replace(CIFAR10, image_size=(15, 40), fit="squash")
    for size in PHOTOS:
        expected = by_torchvision(photo(*size), v2.Resize((15, 40), BICUBIC))
        assert torch.equal(wanted.resize(photo(*size)), expected)
    for fit in ("crop", "pad", "squash"):
        images = torch.zeros(1, 3, 15, 40, dtype=torch.uint8)  # of the right size
        assert dataclasses.replace(wanted, fit=fit).resize_all(images) is images


@with_fits
def test_a_line_of_pixels_needs_no_memory(fit):
    for line in (np.full((1, 100_000, 3), 9, np.uint8), np.full((100_000, 1, 3), 9, np.uint8)):
        wanted = dataclasses.replace(CIFAR10, image_size=(224, 224), fit=fit)
        assert (wanted.resize(line)[:, 111, 111] == 9).all()
        seen, _ = wanted.view(*line.shape[:2])
        assert line[seen].size and (fit != "crop" or line[seen].size <= 3 * 2 * LONGEST)


@with_fits
def test_each_of_many_channels_is_treated_like_a_grey_image(fit):
    pixels = photo(50, 80, 5)
    five = Preprocess((32, 32), (0.1, 0.2, 0.3, 0.4, 0.5), (0.25,) * 5, fit=fit)
    found = five.resize(pixels)
    for channel in range(5):
        one = Preprocess((32, 32), five.mean[channel : channel + 1], (0.25,), fit=fit)
        assert torch.equal(found[channel : channel + 1], one.resize(pixels[..., channel, None]))


@with_fits
@pytest.mark.parametrize("size", [(60, 150), (301, 200)])
def test_a_spot_is_where_the_view_says(size, fit):
    wanted = dataclasses.replace(CIFAR10, fit=fit)
    height, width = size
    place = np.array([0.4 * height, 0.55 * width]).round().astype(int)
    pixels = np.zeros((*size, 3), np.uint8)
    pixels[tuple(slice(middle - 8, middle + 8) for middle in place)] = 255
    bright = wanted.resize(pixels)[0] > 180  # brighter than padding
    found = bright.nonzero().float().mean(dim=0).numpy() + 0.5
    for axis, (seen, padding) in enumerate(zip(*wanted.view(*size), strict=True)):
        view = seen.stop - seen.start + sum(padding)
        expected = (place[axis] - seen.start + padding[0]) / view
        assert found[axis] / 32 == pytest.approx(expected, abs=0.04)


def test_sets_of_images_are_resized_like_photos_and_stored_a_seventh_larger():
    images = torch.from_numpy(photo(32, 40)).permute(2, 0, 1).expand(2, -1, -1, -1)
    wanted = Preprocess.from_config(DataConfig(image_size=(48, 48), channels=1))
    assert torch.equal(wanted.resize_all(images)[1], wanted.resize(photo(32, 40)))
    stored = dataclasses.replace(CIFAR10, image_size=(224, 448), fit="pad").stored()
    assert (stored.image_size, stored.fit, stored.mean) == ((256, 512), "pad", CIFAR10.mean)


# Image files as people see them.


def test_grey_and_rgb_become_each_other_as_in_pillow(tmp_path):
    grey, colour = photo(12, 9, 1)[..., 0], photo(12, 9)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(colour).save(tmp_path / "colour.png")
    expected = {
        ("grey.png", 1): grey[..., None],
        ("grey.png", 3): np.stack([grey] * 3, axis=2),
        ("colour.png", 3): colour,
        ("colour.png", 1): np.asarray(Image.fromarray(colour).convert("L"))[..., None],
    }
    for (name, channels), pixels in expected.items():
        np.testing.assert_array_equal(to_photo(tmp_path / name, channels), pixels)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bits_are_scaled_alike_in_dark_and_bright_images(tmp_path, suffix):
    path, values = tmp_path / f"deep.{suffix}", [0, 255, 256, 514]
    Image.fromarray(np.array([values], np.uint16)).save(path)
    assert to_photo(path, 1)[0, :, 0].tolist() == [value // 257 for value in values]
    for kind in (np.uint16, np.int32) if suffix == "tif" else (np.uint16,):  # of 8 bits
        Image.fromarray(np.array([[0, 3, 128, 255]], kind)).save(path)
        assert to_photo(path, 1)[0, :, 0].tolist() == [0, 3, 128, 255]
    dark, bright = (Image.fromarray(np.array([row], np.uint16)) for row in ([0, 200], [514, 9_000]))
    dark.save(path := tmp_path / "bands.tif", save_all=True, append_images=[bright])
    assert to_photo(path, 2).tolist() == [[[0, 2], [0, 35]]]
    Image.fromarray(np.array([[70_000]], np.int32)).save(tmp_path / "deeper.tif")
    with pytest.raises(ValueError, match=r"deeper\.tif has values below 0 or above 65,535"):
        to_photo(tmp_path / "deeper.tif")


def test_what_is_transparent_is_seen_on_white(tmp_path):
    colour, alpha = photo(12, 9), np.full((12, 9, 1), 255, dtype=np.uint8)
    alpha[:6], alpha[6:, :4] = 0, 51
    Image.fromarray(np.concatenate([colour, alpha], axis=-1)).save(tmp_path / "photo.png")
    share = alpha / 255
    expected = (colour * share + 255 * (1 - share)).round()
    assert np.abs(to_photo(tmp_path / "photo.png") - expected).max() <= 1
    picture = Image.fromarray(np.array([[0, 1]], dtype=np.uint8)).convert("P")
    picture.putpalette(bytes([200, 0, 0, 0, 0, 200]))
    picture.save(tmp_path / "palette.gif", transparency=0)
    assert to_photo(tmp_path / "palette.gif").tolist() == [[[255, 255, 255], [0, 0, 200]]]


def test_damaged_notes_are_ignored_and_damaged_images_refused(tmp_path):
    # Five entries are announced and none is there; a quarter turn beside a resolution that is
    # text; and what is no EXIF at all.
    turn, text = b"\x12\1\3\0\1\0\0\0\6\0\0\0", b"\x1a\1\2\0\3\0\0\0abc\0"
    for notes in (b"II*\0\x08\0\0\0\5\0", b"II*\0\x08\0\0\0\2\0" + turn + text, b"damaged"):
        for name in ("notes.jpg", "notes.png"):
            red = Image.new("RGB", (9, 12), "red")
            red.save(tmp_path / name, exif=b"Exif\0\0" + notes, dpi=(72, 72))
            found = to_photo(tmp_path / name)
            assert (found.shape == (9, 12, 3)) == (turn in notes)
            assert np.ptp(found, axis=(0, 1)).max() <= 2
    for kind in ("PNG", "JPEG", "GIF", "BMP"):
        file, cut = io.BytesIO(), tmp_path / "cut"
        Image.fromarray(photo(20, 30)).save(file, kind)
        content = file.getvalue()
        for length in range(0, len(content) * 9 // 10, max(1, len(content) // 20)):
            cut.write_bytes(content[:length])
            with pytest.raises(ValueError, match=r"cannot be read as an image"):
                to_photo(cut)


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "CMYK"])
def test_bands_are_channels_of_a_file_an_image_and_an_array(tmp_path, mode):
    pixels, path = photo(12, 9, len(mode)), tmp_path / "bands.tif"
    image = Image.frombytes(mode, (9, 12), pixels.tobytes())
    image.save(path)
    for same in (path, str(path), image, np.asfortranarray(pixels)):
        np.testing.assert_array_equal(to_photo(same, len(mode)), pixels)


def test_arrays_images_and_files_are_converted_or_refused(tmp_path):
    Image.fromarray(photo(12, 9)).save(tmp_path / "colour.png")
    words = r"^photo: .*colour\.png has 3 channels, but the model takes 2 \("
    with pytest.raises(ValueError, match=words):
        to_photo(tmp_path / "colour.png", 2)
    for pixels in (photo(12, 9, 1)[..., 0], photo(12, 9)):
        assert to_photo(pixels, 1).shape == (12, 9, 1)
    assert to_photo(photo(12, 9, 5), 5).shape == (12, 9, 5)
    for wrong, words in (
        (photo(12, 9, 1), "the array has 1 channel, but the model takes 5"),
        (photo(12, 9, 4), r"shape \(height, width\) or \(height, width, 5\)"),
        (Image.fromarray(photo(12, 9)), "the image has 3 channels, but the model takes 5"),
    ):
        with pytest.raises(ValueError, match=words):
            to_photo(wrong, 5)


def test_heic_is_read_where_its_package_is_installed(monkeypatch):
    registered: list[bool] = []
    package = SimpleNamespace(register_heif_opener=lambda: registered.append(True))
    monkeypatch.setitem(sys.modules, "pillow_heif", package)
    assert "HEIF" in runpy.run_path(vit.data.pixels.__file__)["FORMATS"]
    assert registered == [True]


def test_only_the_named_formats_are_read_and_no_program_is_started(tmp_path, monkeypatch):
    ran, gs, image = tmp_path / "ran", tmp_path / "gs", Image.fromarray(photo(16, 16))
    gs.write_text(f"#!/bin/sh\ntouch {ran}\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    exported = runpy.run_path(vit.data.pixels.__file__)["open_image"]
    image.save(tmp_path / "x.NEF", "TIFF")
    with pytest.raises(ValueError, match=r"x\.NEF is a camera.s raw photo, .*; convert it to JPEG"):
        to_photo(tmp_path / "x.NEF")
    for kind in ("EPS", "PCX"):
        image.save(tmp_path / "x.png", kind)
        with pytest.raises(ValueError, match=r"x\.png cannot be read as an image: unknown format$"):
            to_photo(tmp_path / "x.png")
        for read in (CIFAR10.load, exported):
            with pytest.raises(UnidentifiedImageError):
                read(tmp_path / "x.png")
    for kind in {*FORMATS} - {"HEIF"}:  # which needs a package
        image.save(tmp_path / "x.png", kind)
        assert to_photo(tmp_path / "x.png").shape == (16, 16, 3), kind
    assert not ran.exists()
    image.save(tmp_path / "x.png", "EPS")
    with Image.open(tmp_path / "x.png") as file, pytest.raises(OSError):
        file.load()
    assert ran.exists()  # what opens every format does start it


def test_photos_are_turned_upright_and_further_frames_ignored(tmp_path):
    for turn, suffix in itertools.product(range(1, 9), ("png", "tif")):  # how the camera was held
        path, exif = tmp_path / f"{turn}.{suffix}", Image.Exif()
        exif[ExifTags.Base.Orientation] = turn
        Image.fromarray(photo(4, 6)).save(path, exif=exif)
        with Image.open(path) as image:
            np.testing.assert_array_equal(to_photo(path), ImageOps.exif_transpose(image))
        if turn in (6, 8):  # Pillow scrambles grey files of these
            Image.fromarray(grey := photo(4, 6)[..., 0]).save(path, exif=exif)
            turned = np.rot90(grey, 3 if turn == 6 else 1)
            np.testing.assert_array_equal(to_photo(path, 1)[..., 0], turned)
    first, second = (Image.new("RGB", (4, 4), (n, n, n)) for n in (10, 200))
    for suffix in ("tif", "gif"):
        first.save(tmp_path / f"several.{suffix}", save_all=True, append_images=[second])
        assert (to_photo(tmp_path / f"several.{suffix}") == 10).all()


def test_pages_of_different_sizes_are_no_bands(tmp_path):
    first, second = Image.new("L", (8, 8)), Image.new("L", (4, 4))
    first.save(tmp_path / "pyramid.tif", save_all=True, append_images=[second])
    with pytest.raises(ValueError, match="has pages of different sizes"):
        to_photo(tmp_path / "pyramid.tif", 2)


def test_a_set_that_would_fill_the_memory_is_refused(monkeypatch):
    images = load("shapes", ".", train=False, count=10)
    monkeypatch.setattr("vit.data.images.free_memory", lambda: 100_000)
    assert images.resized(CIFAR10).images is images.images
    with pytest.raises(ValueError, match=r"^data\.image_size: 10 images of 64 x 64 pixels take"):
        images.resized(dataclasses.replace(CIFAR10, image_size=(64, 64)))
