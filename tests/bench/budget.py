"""Whether the budget holds on a hostile profile: `python tests/bench/budget.py`, from the root of the repository.

A thread calls a function of 50 ns, or a layer of torch of 1 us, in blocks, over and over; each is the target of a rule,
with `budget: 1%`. Blocks of the recorded thing and of a bare twin take turns, so that a machine whose speed wanders
does so for both. What recording costs is the thread's processor time in the one less that in the other, as a share of
the thread's time, from the start of the session on. It must be within 0.3 percentage points of the budget. Exit code 1
where it is not. A layer that is taken off still costs what one that no rule selects costs, some tens of ns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import instrument  # noqa: E402

BUDGET = 0.01
SLACK = 0.003
CALLS = 2_000
HOT = """
def hot():
    pass

def block(calls):
    for _ in range(calls):
        hot()
"""
Block = Callable[[int], None]


def functions() -> tuple[str, Block, Block]:
    """A rule, blocks of what it records, and the same bare."""
    made = []
    for name in ("hostile", "hostile_twin"):
        module = types.ModuleType(name)
        exec(HOT, vars(module))
        sys.modules[name] = module
        made.append(vars(module)["block"])
    return 'functions: [{match: "hostile:hot"}]', made[0], made[1]


def layers() -> tuple[str, Block, Block]:
    """The same of a layer."""
    import torch

    class Hot(torch.nn.Module):
        def forward(self) -> None:
            pass

    class Twin(torch.nn.Module):
        def forward(self) -> None:
            pass

    def block_of(layer: torch.nn.Module) -> Block:
        def block(calls: int) -> None:
            for _ in range(calls):
                layer()

        return block

    return "layers: [{type: [Hot]}]", block_of(Hot()), block_of(Twin())


KINDS = {"functions": functions, "layers": layers}


def held(kind: str, seconds: float) -> bool:
    """Run one kind; whether the budget holds."""
    rule, recorded, bare = KINDS[kind]()
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.yaml"
        profile.write_text(f"{rule}\nbudget: {BUDGET:.0%}\n")
        session = instrument.start(profile)
        spent = {recorded: 0, bare: 0}
        began = time.monotonic()
        end = began + seconds
        turn = [recorded, bare]
        while time.monotonic() < end:
            for block in turn:
                before = time.thread_time_ns()
                block(CALLS)
                spent[block] += time.thread_time_ns() - before
            turn.reverse()
        lasted_ns = (time.monotonic() - began) * 1e9
        notes = session.account.notes() if hasattr(session, "account") else []
        instrument.stop()
    share = (spent[recorded] - spent[bare]) / lasted_ns
    within = share <= BUDGET + SLACK
    print(f"{kind:10} {share:8.2%} of the thread's time, budget {BUDGET:.0%}: {'held' if within else 'NOT held'}")
    print(*(f"  {note}" for note in notes), sep="\n")
    return within


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), metavar="|".join(KINDS))
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    kept = [held(kind, options.seconds) for kind in options.kinds]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    raise SystemExit(main())
