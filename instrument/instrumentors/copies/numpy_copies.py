"""numpy: copies from host to host, which a rule has to ask for.

`numpy.copyto` alone, with which services stage their batches. `numpy.copy` stays as it is, because numba and
torch.compile know it by its identity and would no longer compile what calls it; methods of arrays are made in C.
"""

from __future__ import annotations

from typing import Any

from instrument.instrumentors.copies.transfers import Places, Transfer, Transfers, argument, is_pinned

FRAMEWORK = "numpy"
MODULES = ("numpy",)
WAYS = ("h2h",)
UNSEEN = "numpy.copy, which compilers know by identity, methods of arrays and assignments to slices"


def attach(numpy: Any, transfers: Transfers) -> Places:
    """Replace `numpy.copyto`."""

    def facts(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        target, source = argument(args, kwargs, 0, "dst"), argument(args, kwargs, 1, "src")
        # One value for all places is a fill and no copy.
        if source is target or getattr(source, "size", 1) <= 1 < target.size:
            return None
        return Transfer("h2h", target.nbytes, True, is_pinned(target))

    places = Places(transfers, FRAMEWORK)
    places.functions(numpy, ("copyto",), facts)
    return places
