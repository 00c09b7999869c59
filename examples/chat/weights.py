"""Weights made from a seed: `python -m chat.weights OUT` writes the file that `chat.server --weights OUT` reads.

They are random, so the model talks nonsense; it costs what a trained model of its size costs.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from chat.model import ChatModel, Size
from chat.text import END

SEED = 7
_SILENT = -100.0
_END_BIAS = 0.5


def make_weights(size: Size, seed: int = SEED) -> dict[str, Tensor]:
    """State of a ChatModel, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, like in ChatModel(size).state_dict().items():
        if "norm" in name:
            weights[name] = torch.ones_like(like) if name.endswith("weight") else torch.zeros_like(like)
        elif name.endswith("bias"):
            weights[name] = torch.zeros_like(like)
        else:
            scale = 1.0 if name.startswith("model.tokens") else like.shape[-1] ** -0.5
            weights[name] = scale * torch.randn(like.shape, dtype=like.dtype, generator=generator)
    bias = weights["lm_head.bias"]
    bias[:256] = _SILENT  # single bytes would make unreadable answers; words and the end token remain
    bias[END] = _END_BIAS
    return weights


def save_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Write a state. The same state gives the same bytes, under any file name."""
    with path.open("wb") as file:
        torch.save(weights, file)


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read a state that `save_weights` wrote."""
    weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return weights


def build_model(path: Path | None = None) -> ChatModel:
    """Model with the weights of a file, or with those that the built-in seed gives."""
    model = ChatModel(Size())
    model.load_state_dict(make_weights(Size()) if path is None else load_weights(path))
    return model


def main() -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(prog="python -m chat.weights", description="write the weights of the chat model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    save_weights(options.out, make_weights(Size(), options.seed))


if __name__ == "__main__":
    main()
