"""Positions inside attention: how far apart two patches are, in rows and columns.

Each kind changes the queries, keys and values of the heads, adds a bias to their scores, or changes
their output. Prefix tokens have no position. Every kind also works on other grids than in training.

Shapes: B batch, H heads, N tokens (prefix, then patches row by row), P patches, d head width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Grid = tuple[int, int]  # rows and columns of patches
REACH = 2  # offsets of `RelativePositions` go from -REACH to REACH
TEMPERATURE = 100.0  # of `RotaryPositions`, as in arXiv 2403.13298
# Where heads of `BiasPositions` look at first, in rows and columns from a patch.
STARTS = (0, 1), (0, -1), (1, 0), (-1, 0), (0, 0)
FARTHEST = 8  # cap of the squared distance from there


def coordinates(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return row and column of each patch, (P,) each."""
    place = torch.arange(math.prod(grid), device=device)
    return place.div(grid[1], rounding_mode="floor"), place % grid[1]


class Positions(nn.Module):
    """The base class: no positions in attention. Subclasses override what they change."""

    def __init__(self, num_heads: int, head_dim: int, grid: Grid, num_prefix_tokens: int) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens

    def before(
        self, query: Tensor, key: Tensor, value: Tensor, grid: Grid
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Change queries, keys and values, (B, H, N, d)."""
        return query, key, value

    def bias(self, grid: Grid) -> Tensor | None:
        """Return what is added to the scores of each head, (H, N, N)."""
        return None

    def after(self, heads: Tensor, grid: Grid) -> Tensor:
        """Change the output of heads, (B, H, N, d)."""
        return heads


class BiasPositions(Positions):
    """softmax(Q Kᵀ / √d + b) V, with b learned for each head and offset (arXiv 2103.14030).

    The first heads start as a convolution (arXiv 2103.10697): b is minus the squared distance from
    the patch or one of its neighbours, so that a quarter to a third of their attention goes there.
    The last head, and those beyond `STARTS`, start with b = 0.

    The table is timm's `RelPosBias`: a row for each row offset and column offset between patches,
    from 1 - rows to rows - 1 and from 1 - columns to columns - 1, then one for prefix to patch, for
    patch to prefix and for prefix to prefix. In a larger grid, farther patches count as that far.
    """

    def __init__(self, num_heads: int, head_dim: int, grid: Grid, num_prefix_tokens: int) -> None:
        super().__init__(num_heads, head_dim, grid, num_prefix_tokens)
        self.grid = grid
        # From each query to its keys, in the order of the rows.
        offsets = torch.cartesian_prod(*(torch.arange(n - 1, -n, -1.0) for n in grid))
        table = torch.zeros(len(offsets) + 3 * (num_prefix_tokens > 0), num_heads)
        for head, start in enumerate(STARTS[: num_heads - 1]):
            squares = (offsets - torch.tensor(start)).square().sum(dim=1)
            table[: len(offsets), head] = -squares.clamp(max=FARTHEST)
        self.relative_position_bias_table = nn.Parameter(table)

    def bias(self, grid: Grid) -> Tensor:
        """Return what is added to the scores of each head, (H, N, N)."""
        bias = self.relative_position_bias_table[self.index(grid)].permute(2, 0, 1)
        bias = bias.contiguous()  # which scores are added to faster
        if torch.compiler.is_dynamo_compiling():
            # A copy keeps the compiler from looking it up in the table again for each image.
            return bias.as_strided(bias.shape, bias.stride())
        return bias

    @torch.no_grad()
    def tabulate(self, bias: Tensor) -> Tensor:
        """Set the table from a bias in the constructor's grid, (H, N, N): the inverse of `bias`.

        Returns:
            The table, (offsets, H). Pairs of tokens with the same offset must have the same bias.
        """
        self.relative_position_bias_table[self.index(self.grid)] = bias.permute(1, 2, 0)
        return self.relative_position_bias_table.detach()

    def index(self, grid: Grid) -> Tensor:
        """Return the row of the table for each pair of tokens, (N, N)."""
        table, (rows, columns) = self.relative_position_bias_table, self.grid
        down, across = (x[:, None] - x for x in coordinates(grid, table.device))
        down = down.clamp(1 - rows, rows - 1) + rows - 1
        across = across.clamp(1 - columns, columns - 1) + columns - 1
        index, prefix = down * (2 * columns - 1) + across, self.num_prefix_tokens
        index = F.pad(index, (prefix, 0), value=len(table) - 2)  # patch to prefix
        index = F.pad(index, (0, 0, prefix, 0), value=len(table) - 3)  # prefix to patch
        index[:prefix, :prefix] = len(table) - 1
        return index


def fit_bias_table(table: Tensor, old_grid: Grid, grid: Grid, num_prefix_tokens: int) -> Tensor:
    """Cut the table of `BiasPositions`, (offsets, H), to another grid, or repeat its border."""
    old, new = (BiasPositions(table.shape[1], 0, g, num_prefix_tokens) for g in (old_grid, grid))
    old.load_state_dict({"relative_position_bias_table": table})
    return new.tabulate(old.bias(grid))


class RotaryPositions(Positions):
    """Queries and keys rotated by their row and column (RoPE, arXiv 2104.09864, axial: 2403.13298).

    Pairs of channels of a patch at (row, column) are turned by column ω in the first half and row ω
    in the second, with ω = 100^(-4i / d) for the pair i. A product of two rotated vectors depends
    on the differences of their angles only. Prefix tokens are not turned. Nothing is learned.

    Raises:
        ValueError: head_dim is not a multiple of 4.
    """

    def __init__(self, num_heads: int, head_dim: int, grid: Grid, num_prefix_tokens: int) -> None:
        super().__init__(num_heads, head_dim, grid, num_prefix_tokens)
        if head_dim % 4:
            raise ValueError(f"rel_pos: rope needs a head width that 4 divides, not {head_dim}")

    def before(
        self, query: Tensor, key: Tensor, value: Tensor, grid: Grid
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate queries and keys."""
        # Not buffers, which model.bfloat16() would round.
        rows, columns = coordinates(grid, query.device)
        channels = torch.arange(query.shape[-1], device=query.device)
        frequencies = TEMPERATURE ** -(channels[::4] / len(channels))
        angles = torch.cat([place[:, None] * frequencies for place in (columns, rows)], dim=1)
        angles = F.pad(angles, (0, 0, self.num_prefix_tokens, 0)).repeat_interleave(2, dim=1)
        cosines, sines = angles.cos().to(query.dtype), angles.sin().to(query.dtype)  # (N, d)
        query, key = (x * cosines + _quarter_turn(x) * sines for x in (query, key))
        return query, key, value


def _quarter_turn(x: Tensor) -> Tensor:
    """Turn pairs of channels by 90 degrees: (x, y) becomes (-y, x)."""
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


class RelativePositions(Positions):
    """Vectors for offsets, added to keys and values (arXiv 1803.02155), by row and by column.

    Scores are qᵢ · (kⱼ + a_r + a_c) / √d and outputs Σⱼ wᵢⱼ (vⱼ + b_r + b_c). The vectors of row
    offset r and column offset c are learned for -2 to 2; farther patches count as 2 away. Pairs
    with a prefix token have vectors of their own. All heads share the tables.

    Both are ordinary attention with wider features: query i is extended by its products with the
    vectors of every row and column, and key and value j by ones for their row and column. The last
    features of the output are then sums of weights by row and by column.
    """

    def __init__(self, num_heads: int, head_dim: int, grid: Grid, num_prefix_tokens: int) -> None:
        super().__init__(num_heads, head_dim, grid, num_prefix_tokens)
        # Rows: offsets, then from patch to prefix, and from prefix to any token.
        shape = 2 * REACH + 1 + 2 * (num_prefix_tokens > 0), head_dim
        self.key_rows, self.key_columns, self.value_rows, self.value_columns = (
            nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02)) for _ in range(4)
        )

    def offsets(self, grid: Grid, device: torch.device) -> list[Tensor]:
        """Return the vector in a table of each token for each row, (N, S), and for each column.

        S is the number of rows or columns; with a prefix, which has a place of its own, one more.
        """
        indices, prefix = [], self.num_prefix_tokens
        for place, size in zip(coordinates(grid, device), grid, strict=True):
            index = torch.arange(size, device=device) - place[:, None]
            index = index.clamp(-REACH, REACH) + REACH
            if prefix:
                index = F.pad(index, (0, 1), value=2 * REACH + 1)
                index = F.pad(index, (0, 0, prefix, 0), value=2 * REACH + 2)
            indices.append(index)
        return indices

    def before(
        self, query: Tensor, key: Tensor, value: Tensor, grid: Grid
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Extend queries, keys and values by rows and columns."""
        queries, ones = [query], []
        tables, prefix = (self.key_rows, self.key_columns), self.num_prefix_tokens
        indices, places = self.offsets(grid, query.device), coordinates(grid, query.device)
        for table, index, place, size in zip(tables, indices, places, grid, strict=True):
            vectors = table.to(query.dtype)[index]
            queries.append(torch.einsum("b h n d, n s d -> b h n s", query, vectors))
            own = F.one_hot(F.pad(place, (prefix, 0), value=size), index.shape[1])
            ones.append(own.to(query.dtype).expand(*query.shape[:2], -1, -1))
        wide = torch.cat(queries, dim=-1)
        wide = wide * math.sqrt(wide.shape[-1] / query.shape[-1])  # which attention divides by
        return wide, torch.cat([key, *ones], dim=-1), torch.cat([value, *ones], dim=-1)

    def after(self, heads: Tensor, grid: Grid) -> Tensor:
        """Turn sums by row and column into sums of vectors."""
        tables, indices = (self.value_rows, self.value_columns), self.offsets(grid, heads.device)
        widths = [self.value_rows.shape[1], *(index.shape[1] for index in indices)]
        output, *sums = heads.split(widths, dim=-1)
        for table, index, total in zip(tables, indices, sums, strict=True):
            vectors = table.to(heads.dtype)[index]
            output = output + torch.einsum("b h n s, n s d -> b h n d", total, vectors)
        return output


# Names for `model.rel_pos`.
REL_POS: dict[str, type[Positions]] = {
    "none": Positions,
    "bias": BiasPositions,
    "rope": RotaryPositions,
    "relative": RelativePositions,
}
