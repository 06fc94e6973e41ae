"""Image files as people see them: colours, bands, 16 bits, transparency, orientation, damage."""

import io
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import ExifTags, Image

import vit.data.pixels
from vit.data.photos import to_photo


def draw(channels: int, height: int = 12, width: int = 9) -> np.ndarray:
    shape = (height, width, channels)
    return np.random.default_rng(channels).integers(256, size=shape, dtype=np.uint8)


def test_grey_and_rgb_become_each_other_as_in_pillow(tmp_path: Path) -> None:
    grey, colour = draw(1)[..., 0], draw(3)
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
def test_16_bits_are_scaled_alike_in_dark_and_bright_images(tmp_path: Path, suffix: str) -> None:
    path, values = tmp_path / f"deep.{suffix}", [0, 255, 256, 514]
    Image.fromarray(np.array([values], np.uint16)).save(path)
    assert to_photo(path, 1)[0, :, 0].tolist() == [value // 257 for value in values]
    Image.fromarray(np.array([[70_000]], np.int32)).save(tmp_path / "deeper.tif")
    with pytest.raises(ValueError, match=r"deeper\.tif has 32-bit pixels"):
        to_photo(tmp_path / "deeper.tif")


def test_what_is_transparent_is_seen_on_white(tmp_path: Path) -> None:
    colour, alpha = draw(3), np.full((12, 9, 1), 255, dtype=np.uint8)
    alpha[:6], alpha[6:, :4] = 0, 51
    Image.fromarray(np.concatenate([colour, alpha], axis=-1)).save(tmp_path / "photo.png")
    share = alpha / 255
    expected = (colour * share + 255 * (1 - share)).round()
    assert np.abs(to_photo(tmp_path / "photo.png") - expected).max() <= 1
    picture = Image.fromarray(np.array([[0, 1]], dtype=np.uint8)).convert("P")
    picture.putpalette(bytes([200, 0, 0, 0, 0, 200]))
    picture.save(tmp_path / "palette.gif", transparency=0)
    assert to_photo(tmp_path / "palette.gif").tolist() == [[[255, 255, 255], [0, 0, 200]]]


def test_damaged_notes_are_ignored_and_damaged_images_refused(tmp_path: Path) -> None:
    exif = b"Exif\0\0II*\0\x08\0\0\0\x05\0"  # five entries are announced, none is there
    Image.new("RGB", (9, 12), "red").save(tmp_path / "notes.jpg", exif=exif)
    assert np.ptp(to_photo(tmp_path / "notes.jpg"), axis=(0, 1)).max() <= 2
    for kind in ("PNG", "JPEG", "GIF", "BMP"):
        file, cut = io.BytesIO(), tmp_path / "cut"
        Image.fromarray(draw(3, 20, 30)).save(file, kind)
        content = file.getvalue()
        for length in range(0, len(content) * 9 // 10, max(1, len(content) // 20)):
            cut.write_bytes(content[:length])
            with pytest.raises(ValueError, match=r"cannot be read as an image"):
                to_photo(cut)


def test_files_with_other_channels_than_the_model_are_named(tmp_path: Path) -> None:
    Image.fromarray(draw(3)).save(tmp_path / "colour.png")
    with pytest.raises(
        ValueError, match=r"^data\.root: .*colour\.png has 3 channels, but the model takes 2 \("
    ):
        to_photo(tmp_path / "colour.png", 2, "data.root")


@pytest.mark.parametrize("mode", ["LA", "RGBA", "CMYK"])
def test_bands_are_channels_where_the_model_takes_as_many(tmp_path: Path, mode: str) -> None:
    pixels = draw(len(mode))
    path = tmp_path / "bands.tif"
    Image.frombytes(mode, (9, 12), pixels.tobytes()).save(path)
    np.testing.assert_array_equal(to_photo(path, len(mode)), pixels)


def test_arrays_and_images_are_converted_or_refused_too() -> None:
    assert to_photo(draw(1)[..., 0], 1).shape == to_photo(draw(3), 1).shape == (12, 9, 1)
    assert to_photo(draw(5), 5).shape == (12, 9, 5)
    for wrong, words in (
        (draw(1), "the array has 1 channel, but the model takes 5"),
        (draw(4), r"shape \(height, width\) or \(height, width, 5\)"),
        (Image.fromarray(draw(3)), "the image has 3 channels, but the model takes 5"),
    ):
        with pytest.raises(ValueError, match=words):
            to_photo(wrong, 5)


def test_heic_is_read_where_its_package_is_installed(monkeypatch) -> None:
    registered: list[bool] = []
    package = SimpleNamespace(register_heif_opener=lambda: registered.append(True))
    monkeypatch.setitem(sys.modules, "pillow_heif", package)
    runpy.run_path(vit.data.pixels.__file__)
    assert registered == [True]


def test_photos_are_turned_upright_and_further_frames_ignored(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # taken with the camera on its side
    pixels = np.random.default_rng(0).integers(256, size=(4, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png", exif=exif)
    np.testing.assert_array_equal(to_photo(tmp_path / "photo.png"), np.rot90(pixels, -1))
    first, second = (Image.new("RGB", (4, 4), (n, n, n)) for n in (10, 200))
    for suffix in ("tif", "gif"):
        first.save(tmp_path / f"several.{suffix}", save_all=True, append_images=[second])
        assert (to_photo(tmp_path / f"several.{suffix}") == 10).all()
