"""The turns of a recorded session as a tree: what each kept of which one before, what was given to it and written."""
from __future__ import annotations

from dataclasses import dataclass

from m3jit.timetravel.history import Call, History
from m3jit.timetravel.hosting import Entry
from m3jit.timetravel.steering import TOKENS


@dataclass
class Turn:
    """why: what the host was asked for; parent: the number of the turn whose first `kept` tokens are in the states (0:
    none); given: tokens that were computed before the first one was drawn; written: tokens that were drawn."""
    number: int
    why: str
    parent: int
    kept: int
    given: int
    total: int
    written: int = 0


def turns(history: History) -> list[Turn]:
    """All turns up to where the machine stands."""
    out: list[Turn] = []
    why = ""
    for event in history.events[:history.at]:
        if event.what == "said" and isinstance(event.value, Call) and event.value.text:
            why = event.value.text if not event.value.text.startswith(("resume(", "generate(")) or not why else why
        elif event.what == "host" and (entry := Entry.of(event.value)) is not None:
            parent = entry.mark[1] if entry.mark is not None else 0
            out.append(Turn(len(out) + 1, why, parent, entry.rows, entry.total - entry.rows, entry.total))
            why = ""
        elif event.what == "output" and event.value.sink == TOKENS and out and event.value.head[-1:] < b"\x80":
            out[-1].written += 1
    return out


def tree(history: History) -> list[str]:
    """A line for each turn; one that goes back in another stands indented below it.  `*`: the machine is in it."""
    found, depth = turns(history), [0]
    out = []
    for turn in found:
        before = found[turn.parent - 1] if turn.parent else None
        back = before is not None and turn.kept < before.total + before.written - 1
        depth.append(depth[turn.parent] + (1 if back else 0))
        kept = f"{turn.kept} tokens kept of turn {turn.parent}, {turn.given} more" if before is not None else \
            f"{turn.given} tokens"
        out.append(f"{'*' if turn is found[-1] else ' '}{'  ' * depth[-1]} turn {turn.number}: {kept}, {turn.written} "
                   f"written{f': {turn.why}' if turn.why else ''}")
    return out
