"""Repeating a recorded run: on any backend and number of threads, compared with its log as it goes."""
from __future__ import annotations

import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator

import m3jit
from m3jit.durable import Checkpoints
from m3jit.errors import Divergence, InternalError, M3Error, UserError
from m3jit.frontend.program import Program
from m3jit.timetravel.log_file import LogError, LogReader
from m3jit.timetravel.record import COMPRESSED, fingerprint, program_hash
from m3jit.timetravel.steering import Steering
from m3jit.vm.digest import digest
from m3jit.vm.recording import Event, RecordEnds, Recorder, Tape
from m3jit.vm.regions import check as check_backend
from m3jit.vm.vm import VM

_FIELDS = {"m3jit": str, "name": str, "hash": str, "size": int, "packed": bytes, "program": bytes, "models": dict,
           "seed": int, "wait_input": bool, "memory_limit": int, "ring_capacity": int, "snapshot_window": int,
           "limits": dict, "registers": dict}
_LIMITS = {"context_limit", "snapshot_memory"}
STOPPED = ("Interrupted", "KeyboardInterrupt", "SystemExit", "LimitError", "SinkClosed", "LogFailed")


@dataclass
class Report:
    """What a replay found.  error: what ended the run, as in the recorded one; torn: the log ends early; unclosed:
    sessions that were open when their process ended."""
    outputs: int
    events: int
    instructions: int
    error: BaseException | None
    torn: bool
    unclosed: int = 0


def program_of(head: dict[str, Any], path: str) -> Program:
    """The program in a log's head.  LogError: it is not there, or not the one its hash names."""
    for name, kind in _FIELDS.items():
        if not isinstance(head.get(name), kind):
            raise LogError(f"{path}: does not say its {name!r}; another program made the file, or it is damaged")
    numbers = {name: head.get(name) for name in ("max_steps", "tensor_limit")} | head["limits"]
    for name, value in numbers.items():
        if value is not None and type(value) is not int or name in head["limits"] and name not in _LIMITS:
            raise LogError(f"{path}: its {name!r} is no number; the file was changed after it was written")
    raw = head["program"]
    if head["packed"]:
        if head["size"] > COMPRESSED:
            raise LogError(f"{path}: its program has {head['size']} bytes, {COMPRESSED} at most are kept compressed")
        try:
            raw = zlib.decompressobj().decompress(head["packed"], head["size"] + 1)
        except zlib.error as e:
            raise LogError(f"{path}: its program cannot be unpacked: {e}") from None
    if len(raw) != head["size"] or program_hash(raw) != head["hash"]:
        raise LogError(f"{path}: its program is not the one its hash names")
    return Program.from_bytes(raw, head["name"])


def check_version(head: dict[str, Any], path: str, any_version: bool) -> None:
    """UserError: a log of another version of m3jit, and that was not asked for."""
    if head.get("m3jit") != m3jit.__version__ and not any_version:
        raise UserError(f"{path}: was recorded by m3jit {head.get('m3jit')}, this is {m3jit.__version__}; results of "
                        f"another version may differ. --any-version tries it, and says where they do")


def events_of(reader: LogReader, recorder: Recorder) -> Iterator[Event]:
    """The events of a log; the recorder learns behind the last one how the recorded run ended."""
    yield from reader.events()
    end = reader.end
    if end is None:
        recorder.end = 0                               # cut off: nothing is known behind the last event
    else:
        recorder.end = end.get("retired") if type(end.get("retired")) is int else 0
        recorder.ended_by_itself = end.get("status") not in STOPPED


class KnownModels:
    """A provider whose models must be those of a log.

    moved: files that may stand in for a model whose name leads nowhere now; they are known by their content."""

    def __init__(self, provider: Any, expected: dict[str, str], path: str, moved: tuple[str, ...] = ()):
        self.provider, self.expected, self.path, self.moved = provider, expected, path, moved
        self._checked: dict[str, Any] = {}

    def load(self, reference: str, quant: str = "") -> Any:
        """The model of a reference.  UserError: it has other content than it had."""
        wanted = self.expected.get(reference)
        if wanted is None:
            return self.provider.load(reference, quant)
        if reference not in self._checked:
            self._checked[reference] = self._find(reference, wanted)
        return self._checked[reference]

    def _find(self, reference: str, wanted: str) -> Any:
        others: list[str] = []                         # why each of those that were given is not the one
        for candidate in dict.fromkeys((*self.moved, reference)):
            try:
                model = self.provider.load(candidate)
            except UserError as error:
                others.append(str(error))
                if not self.moved:
                    raise
                continue
            here = fingerprint(model)
            if here == wanted:
                return model
            others.append(f"{candidate} has other content (hash {here})")
        if self.moved:
            raise UserError(f"{self.path}: none of the files here is the model {reference!r} that was used (its "
                            f"content has the hash {wanted}): {'; '.join(others)}. Give the file that was used with "
                            "--model")
        raise UserError(f"{self.path}: was recorded with another model under the name {reference!r}: its "
                        f"content has the hash {wanted}, the one here {here}. Give the file that was used with --model")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.provider, name)


class Replay:
    """A recorded run, ready to be repeated.

    program: must be the recorded one (None: the copy in the log).  files: where files of the program go (None:
    nowhere). any_version: also logs of other versions of m3jit, and of the library of grammars.  finish: called when
    the program has come to its end, as `Recording.finish`.  LogError, UserError: the log is damaged, or of something
    else."""

    def __init__(self, path: str, models: Any, backend: str = "auto", threads: int | None = None,
                 program: Program | None = None, files: str | None = None, any_version: bool = False,
                 moved: tuple[str, ...] = (), echo: bool = True):
        check_backend(backend)                         # before models are loaded
        self.path, self.reader = path, LogReader(path)
        self.head = head = self.reader.head
        check_version(head, path, any_version)
        if "talk" in head:
            raise UserError(f"{path}: is a log of a session, not of a program; m3jit.api.replayed.TalkReplay repeats "
                            f"it")
        recorded = program_of(head, path)
        if program is not None and program_hash(program.to_bytes()) != head["hash"]:
            raise UserError(f"{path}: is a log of another program than {program.name} ({head['name']}, hash "
                            f"{head['hash']}; this one has {program_hash(program.to_bytes())}). Without a "
                            "program, replay runs the copy in the log")
        self.recorder = Recorder(replay=(), echo=echo)
        self.recorder.tape = Tape(events_of(self.reader, self.recorder))
        self.recorder.digest = digest
        self._scratch = tempfile.TemporaryDirectory(prefix="m3jit-replay-") if files is None else None
        known = KnownModels(models, head["models"], path, moved)
        for reference in head["models"]:
            known.load(reference)                      # another model is said before the run
        self.models = known
        if not moved:                                  # machines with one provider share what they compile
            known = models
        self.steering = Steering.of(head, path)
        self.extensions = self.steering.extensions(known, path, any_version) if self.steering is not None else None
        self.finish: Callable[[], None] = lambda: None
        self.vm = machine(head, program or recorded, known, self.recorder, backend, threads,
                          files or self._scratch.name, self.extensions)

    def run(self) -> Report:
        """Repeat it.  Divergence: it did something else than the log says, where and what."""
        error: BaseException | None = None
        try:
            self.vm.run()
            self.finish()
        except (Divergence, LogError, InternalError):
            raise
        except M3Error as e:
            error = e
        finally:
            if self._scratch is not None:
                self._scratch.cleanup()
        self._compare(error)
        ended = None if isinstance(error, RecordEnds) and self.reader.end is not None else error
        return Report(self.recorder.verified, self.recorder.tape.taken, self.vm.retired, ended, self.reader.end is None)

    def _compare(self, error: BaseException | None) -> None:
        """How the run ended, against the end of the log."""
        self.recorder.pass_said()
        left, end = self.recorder.tape.peek(), self.reader.end
        if left is not None:
            raise Divergence(f"replay: the run ended after {self.vm.retired} instructions{_why(error)}, but "
                             f"the log goes on with {left.what} of context {left.context} after {left.retired}")
        if end is None:
            if not isinstance(error, RecordEnds):
                return                                 # the program ended before the recording was cut off
            return
        found = "done" if error is None else type(error).__name__
        if isinstance(error, RecordEnds):
            if end["status"] not in STOPPED:
                raise Divergence(f"replay: the run goes on after {self.vm.retired} instructions, where the "
                                 f"recorded one ended ({end['message'] or 'done'})")
        elif found != end["status"] or found != "LimitError" and str(error or "") != end["message"]:
            raise Divergence(f"replay: the run ended with: {str(error) if error else 'done'}; the recorded one with: "
                             f"{end['message'] or end['status']}")
        more = self.vm.retired - end["retired"]
        # Ctrl-C may come when an instruction's output is out, but not its end.
        if more and (end["exact"] or more != 1):
            raise Divergence(f"replay: the run completed {self.vm.retired} instructions, the recorded one "
                             f"{end['retired']}")
        if end["exact"] and end["digest"]:
            state = digest(self.vm.main)
            if state != end["digest"]:
                raise Divergence(f"replay: the state at the end is {state}, the log has {end['digest']}; all "
                                 "outputs agree")
            self.recorder.verified += 1


def _why(error: BaseException | None) -> str:
    return f" ({error})" if error is not None and str(error) else ""


def machine(head: dict[str, Any], program: Program, models: Any, recorder: Recorder, backend: str, threads: int | None,
            files: str | Path | None, extensions: Any = None) -> VM:
    """The machine of a log's head, before its first instruction."""
    vm = VM(program, backend, threads, head.get("max_steps"), models=models, files=files, wait_input=head["wait_input"],
            seed=head["seed"], snapshot_window=head["snapshot_window"], memory_limit=head["memory_limit"],
            tensor_limit=head.get("tensor_limit"), ring_capacity=head["ring_capacity"], record=recorder,
            **head["limits"], checkpoints=Checkpoints(), extensions=extensions)
    for name, value in head["registers"].items():
        vm.set(name, value)
    return vm
