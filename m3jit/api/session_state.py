"""The state of a session as one value."""
from __future__ import annotations

from dataclasses import dataclass

from m3jit.api.checkpoints import NOTHING, Checkpoint
from m3jit.api.generated import FinishReason


@dataclass(frozen=True)
class SessionState:
    """All of a session at one moment, to go back to with `Session.restore`; nothing in it is a copy of states.

    start: the first token of the text, behind the last prompt.  rest: text that is part of it, but of no token yet.
    valid: so many tokens are those that `latest` was computed with.  random: the random stream behind each token.
    points, prompts: checkpoints of a policy, and where prompts begin."""
    tokens: tuple[int, ...] = ()
    start: int = 0
    rest: str = ""
    finish_reason: FinishReason | None = None
    random: tuple[int, ...] = ()
    latest: Checkpoint = NOTHING
    valid: int = 0
    points: tuple[Checkpoint, ...] = ()
    prompts: tuple[Checkpoint, ...] = ()

    def usable(self, total: int) -> Checkpoint:
        """The states that hold most of the tokens, where there are `total` to compute: all of them only where what
        follows is known too."""
        rows = min(self.valid, self.latest.rows)
        found = [*self.points, *self.prompts, self.latest.cut(rows), self.latest.cut(min(rows, total - 1))]
        fits = [p for p in found if p is not None and (p.rows < total or p.rows == total and p.logits is not None)]
        return max(fits, key=lambda p: p.rows, default=NOTHING)
