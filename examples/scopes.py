"""Names of your own, without a profile file: one decorated function inside one scope, and the table of both."""

import instrument
from instrument import profiled, scope


@profiled("conv_layer")
def convolve(signal: list[float], kernel: list[float]) -> list[float]:
    """Return the sums of products of the kernel with every part of the signal."""
    return [sum(map(float.__mul__, signal[at:], kernel)) for at in range(len(signal) - len(kernel) + 1)]


instrument.start()
for _ in range(100):
    with scope("request", kind="request"):
        convolve([0.5] * 256, [0.25, 0.5, 0.25])
print(instrument.summary())
instrument.stop()
