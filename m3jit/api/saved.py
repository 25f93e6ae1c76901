"""Sessions on disk: saved whole into a store (m3jit.durable), so that reopening one computes nothing."""
from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator

import numpy as np

from m3jit.api.checkpoints import Checkpoint, thinned
from m3jit.api.session_state import SessionState
from m3jit.durable import Store, StoreError
from m3jit.errors import UserError, brief
from m3jit.models.model_source import content_of
from m3jit.vm.commit import Store as Stored

if TYPE_CHECKING:
    from m3jit.api.session import Session
    from m3jit.durable.version import Version

LAYOUT = 3                          # of what is noted beside a version
POINTS = 8                          # checkpoints of recurrent states that are saved
_FIELDS = 12


class SavedSession:
    """The part of `Session` that is about disks."""

    def save(self: Any, store: Store | str | Path, name: str = "session", notes: Any = None) -> Version:
        """Save all of the session, but for what `undo` would take back, as the next version of a name in a store (a
        folder: it is opened for this); it is on the disk when this returns.

        notes: a tree of plain values, kept with it.  StoreError (m3jit.durable): it cannot be written."""
        with self._exclusive(), _opened(store, True) as found:
            return write(self, self._settled(share=False).state, found, name, notes)

    def load(self: Any, store: Store | str | Path, name: str = "session", number: int | None = None) -> Any:
        """Go on from a saved session (number: not from its newest version); its notes.  Nothing is computed.

        StoreError: there is none, it is damaged, or it was saved with another model; nothing changes then."""
        return self._load(store, name, number, lambda notes: ())

    def _load(self: Any, store: Store | str | Path, name: str, number: int | None,
              beside: Callable[[Any], Iterable[Stored]]) -> Any:
        """`load`.  beside: what else is stored with the session, for its notes; what it raises changes nothing."""
        with self._exclusive():
            with _opened(store, False) as found:
                state, notes = read(self, found, name, number)
            self._room(len(state.tokens))
            self._put(self._settled().at(state), beside(notes))
            return notes

    @property
    def identity(self: Any) -> dict[str, Any]:
        """What its saved states go with, by name: the contents of the model and of its adapters (whatever their files'
        names and times), and what else makes its program another one.  Plain values."""
        options = self._options or self.model._options
        return {"model": self.model.model.content_hash, "name": self.model.model.name,
                "adapters": [[content_of(a.source), float(a.scale)] for a in options.adapters],
                "kv_type": options.kv_type, "context": options.context, "chunk": options.chunk,
                "repeat_penalty": self.settings.repeat_penalty != 1}


@contextlib.contextmanager
def _opened(store: Store | str | Path, write: bool) -> Iterator[Store]:
    """A store; one that is given as a folder is open inside."""
    if isinstance(store, Store):
        yield store
        return
    if not isinstance(store, (str, Path)):
        raise UserError(f"store: a m3jit.durable.Store or the name of a folder is expected, got {brief(repr(store))}")
    found = Store.open(store, write=write)
    try:
        yield found
    finally:
        found.close()


def write(session: "Session", state: SessionState, store: Store, name: str, notes: Any) -> Any:
    """Commit a session's state, with `notes` (a tree of plain values); the committed version.  StoreError."""
    identity = session.identity
    machine = session.another_machine()                # its snapshots are gone with it
    latest = state.latest.cut(min(state.valid, state.latest.rows)) or Checkpoint(0, {})
    points = thinned(list(state.points), POINTS)
    prompts = thinned(list(state.prompts), POINTS)
    handles = []
    for point in (*points, *prompts):
        machine.place(point, point.rows)
        handles.append(machine.vm.fork())
    machine.place(latest, latest.rows)
    noted = ["session", LAYOUT, [[key, value] for key, value in identity.items()],
             np.array(state.tokens, np.int64).tobytes(),
             np.array(state.random, np.int64).tobytes(), state.start, state.rest, state.finish_reason,
             state.ended_at, [p.rows for p in (latest, *points, *prompts)], len(points), notes]
    return store.commit(machine.vm, name, noted, handles)


def read(session: "Session", store: Store, name: str, number: int | None) -> tuple[SessionState, Any]:
    """The state that was committed, in a session of the same model and options, and its notes.  StoreError."""
    version = store.latest(name, number)
    where = f"{store.path}: {brief(repr(name))}"
    tree = store.read(version)
    noted = tree[-1] if isinstance(tree, list) and tree else None
    if not (isinstance(noted, list) and len(noted) == _FIELDS and noted[0] == "session"):
        raise StoreError(f"{where}: is no session; Store.restore reads versions of other programs")
    if noted[1] != LAYOUT:
        raise StoreError(f"{where}: its layout is {noted[1]!r}, this version of m3jit reads {LAYOUT}")
    _, _, identity, tokens, random, start, rest, finish, ended_at, rows, count, notes = noted
    differs = difference(dict(identity), session.identity)
    if differs:
        raise StoreError(f"{where}: {differs}; open it so, or save the new session under another name or in another "
                         f"folder")
    vm = session.another_machine().vm
    restored = store.restore(vm, name, version.number)
    latest = Checkpoint(rows[0], vm.states(object), vm.get("rLogits"))
    found = []
    for handle, held in zip(restored.snapshots, rows[1:]):
        vm.abort(handle)
        found.append(Checkpoint(held, vm.states(object), vm.get("rLogits")))
    ids = tuple(np.frombuffer(tokens, np.int64).tolist())
    state = SessionState(ids, start, rest, finish, tuple(np.frombuffer(random, np.int64).tolist()), latest, rows[0],
                         tuple(found[:count]), tuple(found[count:]), ended_at)
    return state, notes


def is_session(store: Store, name: str) -> bool:
    """Is the newest version of a name a session?  StoreError: it is damaged."""
    tree = store.read(store.latest(name))
    noted = tree[-1] if isinstance(tree, list) and tree else None
    return isinstance(noted, list) and len(noted) > 2 and noted[0] == "session"


def difference(saved: dict[str, Any], here: dict[str, Any]) -> str:
    """In what a session that was saved differs from one that would take its place (`identity`); "" in nothing."""
    found = []
    for key, value in saved.items():
        mine = here.get(key)
        if mine == value or key == "name":
            continue
        if key == "model":
            found.append(f"with another model, {brief(repr(saved['name']))} of content {value}, and the one here is "
                         f"{brief(repr(here['name']))} of content {mine}")
        elif key == "adapters":
            found.append(f"with {_adapters(value)}, and here there is {_adapters(mine)} (adapters=, --lora)")
        elif key == "repeat_penalty":
            found.append(f"{'with' if value else 'without'} a repeat penalty, and here there is "
                         f"{'one' if mine else 'none'} (repeat_penalty=, --repeat-penalty; 1: none)")
        else:
            found.append(f"with the option {key} = {value}, and here it is {mine}"
                         + (" (--kv-type)" if key == "kv_type" else ""))
    return "was saved " + "; and ".join(found) if found else ""


def _adapters(found: list[Any]) -> str:
    return ", ".join(f"the adapter of content {content}, scale {scale:g}" for content, scale in found) or "no adapter"
