"""Models of Keras for tests. A module of their own, for Keras must not be imported where tests are collected."""

from __future__ import annotations

from typing import Any

import keras


class Block(keras.layers.Layer):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.up = keras.layers.Dense(8, name="up")
        self.down = keras.layers.Dense(4, name="down")

    def call(self, x: Any) -> Any:
        return self.down(self.up(x))


class Model(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="tiny")
        self.blocks = [Block(name="first"), Block(name="second")]
        self.head = keras.layers.Dense(2, name="head")

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)
