"""A decoder-only transformer that keeps the keys and values of earlier tokens in a cache.

Decoding always has the same shapes: all slots of the cache, its full length, and a mask. Numbers have 64 bits: the
order in which a matrix product is summed still depends on the row, and what that changes (about 1e-14) must never
decide between two tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from chat.text import VOCABULARY


@dataclass(frozen=True)
class Size:
    """Shape of the model; `length` is the most tokens that one sequence may have, prompt and answer together."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    length: int = 160
    vocabulary: int = VOCABULARY


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, each [slot, position, head, channel]."""

    keys: Tensor
    values: Tensor

    def slot(self, slot: int) -> "LayerCache":
        """View of one slot, as a batch of one."""
        return LayerCache(self.keys[slot : slot + 1], self.values[slot : slot + 1])


Cache = list[LayerCache]


def make_cache(size: Size, slots: int, device: torch.device) -> Cache:
    """Empty cache for `slots` sequences at a time."""
    shape = (slots, size.length, size.heads, size.width // size.heads)
    cache = torch.zeros((size.layers, 2, *shape), dtype=torch.float64, device=device)
    return [LayerCache(keys, values) for keys, values in cache]


class Attention(nn.Module):
    """Causal attention of several heads: over its own input, or with a cache over all that the slot has seen."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.output = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor, positions: Tensor, cache: LayerCache | None) -> Tensor:
        """Attend from x [row, token, channel], with its tokens at `positions` [row, token]."""
        rows, tokens, width = x.shape
        query, keys, values = self.query_key_value(x).view(rows, tokens, 3, self.heads, width // self.heads).unbind(2)
        seen = positions
        if cache is not None:
            at = torch.arange(rows, device=x.device)[:, None], positions
            cache.keys[at], cache.values[at] = keys, values
            keys, values = cache.keys, cache.values
            seen = torch.arange(keys.shape[1], device=x.device)[None, :]
        mask = seen[:, None, None, :] <= positions[:, None, :, None]
        mixed = scaled_dot_product_attention(
            query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask
        )
        result: Tensor = self.output(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return result


class MLP(nn.Module):
    """Two linear layers, four times as wide in between."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up = nn.Linear(size.width, 4 * size.width)
        self.activation = nn.GELU()
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform every token of x by itself."""
        result: Tensor = self.down(self.activation(self.up(x)))
        return result


class Block(nn.Module):
    """One layer of the decoder: attention, then MLP, each added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp = MLP(size)

    def forward(self, x: Tensor, positions: Tensor, cache: LayerCache | None) -> Tensor:
        """Transform x [row, token, channel]."""
        x = x + self.attention(self.attention_norm(x), positions, cache)
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Decoder(nn.Module):
    """Embeddings and the stack of layers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: Tensor, positions: Tensor, cache: Cache | None) -> Tensor:
        """Hidden state [row, token, channel] of tokens [row, token]."""
        x: Tensor = self.tokens(tokens) + self.positions(positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, positions, None if cache is None else cache[index])
        result: Tensor = self.norm(x)
        return result


class ChatModel(nn.Module):
    """Decoder and output head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.model = Decoder(size)
        self.lm_head = nn.Linear(size.width, size.vocabulary)
        self.double()  # see the top of the file

    def forward(self, tokens: Tensor, positions: Tensor, cache: Cache | None = None) -> Tensor:
        """Scores [row, token, vocabulary] of what follows each token; with a cache, the cache is extended by them."""
        result: Tensor = self.lm_head(self.model(tokens, positions, cache))
        return result
