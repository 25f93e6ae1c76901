"""`m3jit store`, and `m3jit run --store`."""
from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import time
from typing import Any, Iterator

import click

from m3jit.cli.options import UsageError
from m3jit.cli.terminal import note, table
from m3jit.errors import Interrupted, LimitError, UserError


@click.command()
@click.argument("folder")
@click.option("--verify", is_flag=True, help="Read every version completely; exit code 1 when one is damaged.")
@click.option("--repair", is_flag=True, help="Keep what is whole: cut a damaged log, drop damaged versions.")
@click.option("--compact", is_flag=True,
              help="Keep the newest version of each name, and give the space of the others back.")
@click.option("--keep", type=click.IntRange(1), metavar="N",
              help="With --compact: keep the newest N versions of each name.")
@click.option("--remove", metavar="NAME", help="Forget the versions of a name.")
@click.option("--log", "log", metavar="NAME",
              help="Write what a program appended to its log (region WAL) to standard output.")
def store(folder: str, verify: bool, repair: bool, compact: bool, keep: int | None, remove: str | None,
          log: str | None) -> int:
    """List, check and tidy the versions in FOLDER, a store of `m3jit run --store`, `m3jit chat` or CHECKPOINT_SAVE."""
    from m3jit.durable import Store
    if log is not None and (verify or repair or compact or keep or remove):
        raise UsageError("--log goes with no other option")
    if keep is not None and not compact:
        raise UsageError("--keep goes with --compact")
    with Store.open(folder, write=repair or compact or remove is not None, repair=repair, make=False) as found:
        if log is not None:
            if log not in found.appended:
                have = ", ".join(map(repr, sorted(found.appended)[:10])) or "none"
                raise UserError(f"{folder}: no program has appended to a log {log!r}; logs in it: {have}")
            output = click.get_binary_stream("stdout")
            for piece in found.log_of(log):
                output.write(piece)
            return 0
        if found.damage is not None:
            note(f"the log was cut at byte {found.damage.offset}: {found.damage.what}")
        if remove is not None:
            found.remove(remove)
        if compact:
            note(f"{found.compact(keep or 1)} bytes given back")
        wrong = _by_damage(found) if verify else []
        click.echo(table(("name", "version", "kept", "written", "bytes"), list(_rows(found)), "124"))
        for line in wrong:
            note(line)
        if wrong:
            note(f"`m3jit store {folder} --repair` keeps what is whole and drops these versions")
        elif verify:
            note("every version is whole")
    return 1 if wrong else 0


def _by_damage(found: Any) -> list[str]:
    """A line for each damage of a store and each name, with the versions that it concerns."""
    versions: dict[tuple[str, str], list[str]] = {}
    for version, wrong in found.damaged():
        versions.setdefault((version.name, wrong), []).append(str(version.number))
    return [f"{name} version{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {wrong}"
            for (name, wrong), numbers in versions.items()]


def _rows(found: Any) -> Iterator[tuple[str, ...]]:
    """Of each name its newest version, and how many there are."""
    for name in found.names():
        newest = found.latest(name)
        when = newest.time / 1e9
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) if 0 < when < 1e10 else "?"
        yield name, str(newest.number), str(len(found.versions[name])), written, f"{newest.bytes:,}"


class _OnDemand:
    """Checkpoints (m3jit.Checkpoints) that are loaded when a program asks for one."""
    _made: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            from m3jit.durable import Checkpoints
            self._made = Checkpoints()
        return getattr(self._made, name)

    def ended(self) -> None:
        """A machine without a store of its own keeps nothing to go on from."""

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


@contextlib.contextmanager
def opened(folder: str | None) -> Iterator[Any]:
    """The disk of a machine with --store FOLDER (None: of one without it)."""
    if folder is None:
        yield _OnDemand()
        return
    from m3jit.durable import Checkpoints, Store
    with Store.open(folder) as found:
        check_content(found, "runs")
        yield Checkpoints(found)


def given(vm: Any, inputs: str | list[str], options: dict[str, Any]) -> list[Any]:
    """What a run of `m3jit run` is given before it begins, for the notes of its versions (m3jit.durable.given).

    inputs: a model's prompt, or what a program reads.  What comes while it runs is not known: lines of a terminal are
    none of it, and of a pipe it is known that there is one."""
    from m3jit.durable.given import item
    from m3jit.vm.context import DEFAULT_SEED
    items = []
    if isinstance(inputs, str):
        items += [item("the prompt", inputs), item("--chat", "yes" if options["chat"] else "no")]
        if options["system"]:
            items.append(item("--system", options["system"]))
    elif inputs:
        items += [item(f"input {number}", text) for number, text in enumerate(inputs, 1)]
    else:
        items += standard_input_item()
        if options["lines"]:
            items.append(item("--lines", "yes"))
    items.append(item("--seed", "the default" if vm.seed == DEFAULT_SEED else str(vm.seed)))
    for name, _, value in (text.partition("=") for text in options["bindings"]):
        label, content = f"--bind {name.strip()}", value.strip()
        if content.startswith("@"):
            with open(content[1:], "rb") as file:
                items.append(item(label, file.read(), content))
        else:
            items.append(item(label, content))
    return items


def standard_input_item() -> list[Any]:
    """The item of standard input, which stays where it is: of a file its content, of a pipe that it is one; none of a
    terminal, a device, or where it is closed."""
    from m3jit.cli.machine import STDIN
    from m3jit.durable.given import item
    label = "standard input"
    try:
        mode = os.fstat(STDIN).st_mode
        if not stat.S_ISREG(mode):
            return [item(label, None)] if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else []
        at, parts = os.lseek(STDIN, 0, os.SEEK_CUR), []
        while part := os.pread(STDIN, 1 << 20, at):
            parts.append(part)
            at += len(part)
    except OSError:                                    # closed: the program is given none
        return []
    return [item(label, b"".join(parts))]


def check_content(found: Any, wanted: str) -> None:
    """Is a store one of "conversations" (`m3jit chat --session`) or of "runs" (`m3jit run --store`)?  Its newest
    versions tell; where there are none, or none that can be read, it may become one.  UserError: it is the other one
    alone."""
    from m3jit.durable import StoreError
    kinds = {"runs"} if found.appended else set()
    for name in found.names():
        from m3jit.api.saved import is_session
        with contextlib.suppress(StoreError):          # a damaged one is said when it is wanted
            kinds.add("conversations" if is_session(found, name) else "runs")
    if kinds and wanted not in kinds:
        other = kinds.pop()
        made = "m3jit chat --session" if other == "conversations" else "a program (m3jit run --store, CHECKPOINT_SAVE)"
        raise UserError(f"{found.path}: is a store of {other}, made by {made}; give {wanted} a folder of their own")


class _Stops:
    """Signals while a machine runs: they stop it between two instructions, where its state is one of the program's and
    what it said is whole.  A second one breaks it off wherever it is.

    Outside the main thread, which gets all signals, it changes nothing, and a signal that is ignored stays so.  `ends`:
    end the command as the signal does without this."""

    def __init__(self, vm: Any, *numbers: int):
        self.vm, self.first, self._numbers, self._before = vm, 0, numbers, {}

    def _arrived(self, number: int, frame: Any) -> None:
        if self.first:
            self.ends(number, frame)
        self.first = number
        self.vm.stop()

    def ends(self, number: int, frame: Any = None) -> None:
        before = self._before[number]
        if callable(before):
            before(number, frame)
        raise KeyboardInterrupt

    def __enter__(self) -> "_Stops":
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._arrived)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)


@contextlib.contextmanager
def kept(vm: Any, folder: str | None, fresh: bool = False) -> Iterator[None]:
    """A run with --store: it begins at the store's last version.  One that is stopped leaves a version of where it was;
    one that is broken off by a second signal leaves none; one that comes to its end leaves none to go on
    from.  Without a store (None) Ctrl-C stops a run in the same way, unless it is recorded.  fresh: one that is
    recorded; UserError: it would not begin at its beginning, where a log begins."""
    if folder is None:
        with contextlib.nullcontext() if fresh else _Stops(vm, signal.SIGINT):
            yield
        return
    from m3jit.durable.checkpoints import RUN
    disk = vm.checkpoints
    if fresh and RUN in disk.store.names():
        raise UserError(f"{folder}: a run would go on from version {disk.store.latest(RUN).number}, and the "
                        "log of a run begins at its beginning. Give --store an empty folder, or forget the version "
                        f"(m3jit store {folder} --remove {RUN})")
    back = disk.resume(vm)
    if back is not None:
        note(f"{folder}: going on from version {back.version.number}")
    with _Stops(vm, signal.SIGINT, signal.SIGTERM) as stops:
        try:
            yield
        except (Interrupted, LimitError):
            disk.commit(vm)
            note(f"{folder}: version {disk.store.latest(RUN).number} is where it was stopped; the same command goes on")
            if stops.first == signal.SIGTERM:
                stops.ends(signal.SIGTERM)
            raise
