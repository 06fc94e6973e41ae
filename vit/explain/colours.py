"""Colours of maps, the same in all pictures and in the Attention tab.

Maps are in units of uniform attention, or signed in units of their mean absolute value. Each unit
has one fixed scale of colours, so figures can be compared. A colour table has 256 colours, six
hexadecimal digits each. TensorBoard imports this, so it needs neither torch nor matplotlib.
"""

import functools
from typing import TYPE_CHECKING

import numpy as np

from vit.registry import ALL_KINDS

if TYPE_CHECKING:
    from torch import Tensor

# matplotlib's colour map "inferno" in 256 steps, (255 * colour) rounded down as matplotlib does:
# by Nathaniel J. Smith, Stefan van der Walt and Eric Firing, published under CC0.
INFERNO = (
    "00000300000400000601000701010901010b02010e02021003021204031404031605041806041b07051d08061f090621"
    "0a07230b07260d08280e082a0f092d10092f120a32130a34140b36160b39170b3b190b3e1a0b401c0c431d0c451f0c47"
    "200c4a220b4c240b4e260b50270b52290b542b0a562d0a582e0a5a300a5c32095d34095f3509603709613909623b0964"
    "3c09653e0966400966410967430a68450a69460a69480b6a4a0b6a4b0c6b4d0c6b4f0d6c500d6c520e6c530e6d550f6d"
    "570f6d58106d5a116d5b116e5d126e5f126e60136e62146e63146e65156e66156e68166e6a176e6b176e6d186e6e186e"
    "70196e72196d731a6d751b6d761b6d781c6d7a1c6d7b1d6c7d1d6c7e1e6c801f6b811f6b83206b85206a86216a88216a"
    "8922698b22698d23698e24689024689125679325679526669626669827659928649b28649c29639e2963a02a62a12b61"
    "a32b61a42c60a62c5fa72d5fa92e5eab2e5dac2f5cae305baf315bb1315ab23259b43358b53357b73456b83556ba3655"
    "bb3754bd3753be3852bf3951c13a50c23b4fc43c4ec53d4dc73e4cc83e4bc93f4acb4049cc4148cd4247cf4446d04544"
    "d14643d24742d44841d54940d64a3fd74b3ed94d3dda4e3bdb4f3adc5039dd5238de5337df5436e05634e25733e35832"
    "e45a31e55b30e65c2ee65e2de75f2ce8612be9622aea6428eb6527ec6726ed6825ed6a23ee6c22ef6d21f06f1ff0701e"
    "f1721df2741cf2751af37719f37918f47a16f57c15f57e14f68012f68111f78310f7850ef8870df8880cf88a0bf98c09"
    "f98e08f99008fa9107fa9306fa9506fa9706fb9906fb9b06fb9d06fb9e07fba007fba208fba40afba60bfba80dfbaa0e"
    "fbac10fbae12fbb014fbb116fbb318fbb51afbb71cfbb91efabb21fabd23fabf25fac128f9c32af9c52cf9c72ff8c931"
    "f8cb34f8cd37f7cf3af7d13cf6d33ff6d542f5d745f5d948f4db4bf4dc4ff3de52f3e056f3e259f2e45df2e660f1e864"
    "f1e968f1eb6cf1ed70f1ee74f1f079f1f27df2f381f2f485f3f689f4f78df5f891f6fa95f7fb99f9fc9dfafda0fcfea4"
)

# The same for "RdBu_r": red and blue by Cynthia Brewer (ColorBrewer), Apache License 2.0.
RED_BLUE = (
    "05306106326307346608366909386c0a3a6f0b3c720c3e750d40780e437b0f457e114781124984134b87144d8a154f8d"
    "1651901754931856951958981a5a9b1c5c9e1d5ea11e60a41f62a72064aa2166ac2368ad246aae256caf276db0286fb0"
    "2971b12b73b22c75b32d76b42f78b5307ab6317cb7337db8347fb93581b93783ba3884bb3986bc3b88bd3c8abe3d8bbf"
    "3f8dc0408fc14191c24393c34694c44996c54c98c64f9ac7529cc8559ec958a0ca5ba2cb5ea4cc61a6cd65a8ce68aacf"
    "6bacd06eaed171b0d274b2d377b4d57ab6d67db8d780bad884bcd987beda8ac0db8dc2dc90c4dd93c5de95c6df98c8df"
    "9ac9e09dcae19fcbe1a2cde2a4cee3a7cfe4a9d0e4abd2e5aed3e6b0d4e6b3d5e7b5d7e8b8d8e8bad9e9bddaeabfdceb"
    "c2ddebc4deecc7dfedc9e1edcce2eecee3efd1e5f0d2e5f0d3e6f0d5e7f0d6e7f1d8e8f1d9e9f1dbe9f1dceaf2deebf2"
    "dfecf2e1ecf3e2edf3e4eef3e5eef3e7eff4e8f0f4eaf1f4ebf1f4edf2f5eef3f5f0f3f5f1f4f6f3f5f6f4f5f6f6f6f6"
    "f7f6f6f7f5f4f7f4f2f7f3f0f8f2eef8f0ecf8efeaf8eee8f9ede7f9ece5f9ebe3f9eae1f9e9dffae8ddfae7dbfae5d9"
    "fae4d7fbe3d6fbe2d4fbe1d2fbe0d0fcdfcefcdeccfcddcafcdcc8fddbc7fcd8c4fcd6c1fbd4befbd2bcfbd0b9faceb6"
    "faccb4facab1f9c7aef9c5abf9c3a9f8c1a6f8bfa3f8bda1f7bb9ef7b99bf7b799f6b496f6b293f5b090f5ae8ef5ac8b"
    "f4aa88f4a886f4a683f3a380f2a07ef19e7cef9b7aee9878ed9676ec9374eb9072ea8e70e88b6ee7886ce6856ae58368"
    "e48065e27d63e17b61e0785fdf755dde725bdd7059db6d57da6a55d96853d86551d7624fd6604dd45d4bd35a4ad15749"
    "d05447ce5146cd4f45cc4c43ca4942c94641c7433fc6403ec53e3cc33b3bc2383ac03538bf3237be3036bc2d34bb2a33"
    "b92732b82431b6212fb51f2eb41c2db2192bb0172aad162aaa1529a71429a41328a112289e11279b1027991027960f26"
    "930e26900d258d0c258a0b24870a248409238108237e07227b06227805217504217203206f02206c011f69001f67001f"
)

SCALE = (0.0, 3.0)  # units of uniform attention

Bar = tuple[str, tuple[float, float], str]  # colour table, scale, label
UNIFORM: Bar = (INFERNO, SCALE, "× uniform")
SIGNED: Bar = (RED_BLUE, (-SCALE[1], SCALE[1]), "against ← → for, × mean")


def bar_of(kind: str) -> Bar:
    """Return the colours and scale of a kind of map."""
    return SIGNED if ALL_KINDS[kind].signed else UNIFORM


def colour_map(heat: "Tensor", bar: Bar = UNIFORM) -> np.ndarray:
    """Colour a map (rows, columns): (rows, columns, 3) uint8."""
    colours, (low, high), _ = bar
    return colour((heat.cpu().numpy() - low) / (high - low), table_of(colours))


@functools.cache
def table_of(colours: str) -> np.ndarray:
    """Return a colour table as an array, (256, 3) uint8."""
    return np.frombuffer(bytes.fromhex(colours), np.uint8).reshape(-1, 3)


def blues() -> np.ndarray:
    """Return a table from nearly white to dark blue, (256, 3) uint8."""
    return np.linspace((240, 245, 250), (20, 60, 120), 256).round().astype(np.uint8)


def colour(shares: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Colour numbers.

    Args:
        shares: (...), from 0, the first colour, to 1, the last; others get the nearest colour.
        table: (256, 3) uint8.

    Returns:
        (..., 3) uint8.
    """
    steps = np.nan_to_num(256 * np.asarray(shares)).clip(0, 255)
    return table[steps.astype(np.uint8)]


def as_pixels(image: "Tensor") -> np.ndarray:
    """Turn an image (channels, H, W) uint8 into pixels (H, W, 3)."""
    return as_rgb(image.permute(1, 2, 0).cpu().numpy())


def as_rgb(pixels: np.ndarray) -> np.ndarray:
    """Show any number of channels in colour: up to two as their mean, else the first three.

    Args:
        pixels: (..., channels) uint8.

    Returns:
        (..., 3) uint8.
    """
    if pixels.shape[-1] < 3:
        mean = pixels.mean(axis=-1, keepdims=True).round().astype(np.uint8)
        return np.repeat(mean, 3, axis=-1)
    return pixels[..., :3]
