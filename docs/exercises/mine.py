"""Exercise 1: multi-head self-attention. Replace the last line by yours."""

import torch
from torch import nn


class Attention(nn.Module):
    """softmax(Q Kᵀ / √d) V in each of H heads (arXiv 1706.03762)."""

    def __init__(self, dim, num_heads, dropout=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask=None):
        """Attend with tokens x, (B, N, dim).

        The mask is None, or True where a query may attend to a key; it broadcasts to (B, H, N, N).
        """
        query, key, value = self.query(x), self.key(x), self.value(x)  # (B, N, dim)
        # Split each into heads, (B, H, N, d).
        # Scores, (B, H, N, N): products of queries and keys, divided by √d.
        # With a mask, the scores where mask == 0 become -1e9.
        # Weights: softmax of the scores over the keys. Dropout acts on a copy of them.
        # Heads: sums of the values by these weights, merged to (B, N, dim).
        # return self.out(heads), weights
        raise NotImplementedError("compute the heads, and return self.out(heads), weights")
