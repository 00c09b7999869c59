"""Floating-point operations of torch's operators, from the shapes that torch.profiler notes with `record_shapes=True`.

Products of matrices, convolutions and attention, forward and backward: what `torch.utils.flop_counter` counts, and
products with vectors. A multiplication and an addition are two. Element-wise work is not counted. Attention counts
every pair of a query and a key, also where a mask leaves some out. The backward pass of a grouped convolution takes
what its groups hold; `flop_counter` (2.13) takes every pair of channels there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from instrument.trace.text import INT64

Shape = Sequence[int]
_Formula = Callable[[Sequence[Shape], Sequence[str]], int]

MOST_DIMENSIONS = 64
"""More no tensor of torch has; a damaged file would have products of numbers without end worked out."""

_NUMBERS = re.compile(r"\[([0-9]{1,9}(?:, [0-9]{1,9})*)?\]")
_TRUTHS = re.compile(r"\[((?:True|False)(?:, (?:True|False))*)\]")


def is_counted(name: str) -> bool:
    """Return True where the operations of torch's operators of this name are counted."""
    return name in _FORMULAS


def flops_of(name: str, args: Mapping[str, Any]) -> int | None:
    """Return the operations of a call of one of torch's operators, by the name and the arguments of its event.

    None where it is none that is counted, its shapes are not there, or they are not those of such a call.
    """
    formula = _FORMULAS.get(name)
    shapes, values = args.get("Input Dims"), args.get("Concrete Inputs")
    if formula is None or not isinstance(shapes, list):
        return None
    texts = [value if isinstance(value, str) else "" for value in values] if isinstance(values, list) else []
    try:
        count = formula([_shape(one) for one in shapes], texts)
    except (ArithmeticError, ValueError, IndexError):
        return None
    return count if 0 < count < INT64 else None


def _shape(sizes: object) -> Shape:
    """A shape, () for an argument that is no tensor."""
    if not isinstance(sizes, list) or len(sizes) > MOST_DIMENSIONS:
        return ()
    if not all(type(size) is int and 0 <= size < INT64 for size in sizes):
        return ()
    return sizes


def _product(left: Shape, right: Shape) -> int:
    """Return the operations of matrices with as many others, or with a vector."""
    *batch, rows, inner = left
    *others, inner_too, columns = right if len(right) > 1 else (*right, 1)
    if inner != inner_too or batch != others:
        raise ValueError("the shapes do not fit")
    return 2 * prod(batch) * rows * inner * columns


def _products(first: int) -> _Formula:
    """Return the formula for a product of the tensors at a place and after it."""
    return lambda shapes, _: _product(shapes[first], shapes[first + 1])


def _dot(shapes: Sequence[Shape], _: Sequence[str]) -> int:
    return _product((1, *shapes[0]), shapes[1])


def _convolution(shapes: Sequence[Shape], values: Sequence[str]) -> int:
    source, weight = shapes[:2]
    size = source[2:]
    stride, padding, dilation = (_each(value, len(size)) for value in values[3:6])
    if values[6] != "True":
        size = [
            (have + 2 * more - apart * (width - 1) - 1) // step + 1
            for have, width, step, more, apart in zip(size, weight[2:], stride, padding, dilation, strict=True)
        ]
    return _convolved(source, weight, size)


def _convolution_backward(shapes: Sequence[Shape], values: Sequence[str]) -> int:
    gradient, source, weight = shapes[:3]
    wanted = _TRUTHS.fullmatch(values[10])
    if wanted is None:
        raise ValueError("the wanted gradients are unknown")
    # As many for the gradient of the input as for that of the weight, and as in the way forward.
    size = source[2:] if values[7] == "True" else gradient[2:]
    return wanted[1].split(", ")[:2].count("True") * _convolved(source, weight, size)


def _convolved(source: Shape, weight: Shape, size: Shape) -> int:
    """Return the operations of the weight at each place, for each of the batch: it has a group's inputs per output."""
    if len(source) != len(weight) or len(source) < 3 or min(size) < 0:
        raise ValueError("the shapes do not fit")
    return 2 * source[0] * prod(size) * prod(weight)


def _each(value: str, dimensions: int) -> list[int]:
    """A number for each dimension, of which one may stand for all."""
    found = _NUMBERS.fullmatch(value)
    if found is None or not found[1]:
        raise ValueError("there are no numbers")
    numbers = list(map(int, found[1].split(", ")))
    return numbers * dimensions if len(numbers) == 1 else numbers


def _attention(backward: bool) -> _Formula:
    def formula(shapes: Sequence[Shape], _: Sequence[str]) -> int:
        query, key, value = shapes[backward : 3 + backward]
        batch, heads, queries, inner = query
        if not len(key) == len(value) == 4 or key[3] != inner or key[2] != value[2] or key[0] != batch:
            raise ValueError("the shapes do not fit")
        # Forward the scores and what they weigh. Backward the scores again, their gradient, and those of all three.
        widths = 3 * inner + 2 * value[3] if backward else inner + value[3]
        return 2 * batch * heads * queries * key[2] * widths

    return formula


_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")

_FORMULAS: Mapping[str, _Formula] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::mv", "aten::_scaled_mm", "aten::_int_mm"), _products(0)),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::addmv"), _products(1)),
    **dict.fromkeys(("aten::addmm_", "aten::baddbmm_", "aten::addbmm_", "aten::addmv_"), _products(1)),
    "aten::dot": _dot,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    **{f"aten::_scaled_dot_product_{name}": _attention(backward=False) for name in _ATTENTION},
    **{f"aten::_scaled_dot_product_{name}_backward": _attention(backward=True) for name in _ATTENTION},
}
"""The formulas by the name of the event. Where one event is within another, the outer one counts."""
