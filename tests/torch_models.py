"""Models of torch for tests. A module of their own, for torch must not be imported where tests are collected."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """A model with a name for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Stack(nn.Module):
    """A model with a list of layers."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLP() for _ in range(depth)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Nested(nn.Module):
    """A model of two layers, nested as models are, with one output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x))
