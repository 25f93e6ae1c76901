"""What `m3jit chat` does with a line: a message is answered, a command obeyed, an answer paused and corrected."""
from __future__ import annotations

import contextlib
import json
import re
import sys
from typing import Any, Callable, Iterator

from m3jit.cli import explained, keys
from m3jit.cli.interrupts import Interrupts
from m3jit.cli.picker import ACCEPT, Picker, Screen
from m3jit.cli.terminal import note, write_file
from m3jit.errors import UserError, brief

HELP = """/edit OLD => NEW     put NEW where OLD begins in the last answer, and go on from there
/edit => NEW         go on with NEW behind the last answer; /edit@2 OLD => NEW: where OLD stands the second time
/correct             pick the place in the last answer with the arrow keys (on a terminal)
/continue            go on with an answer that was stopped
/undo-correction     take the last correction back
/fork NAME           keep the conversation as it is under a name, and go on
/switch NAME         go on with the one of that name; the other keeps its own ("main" at the beginning)
/undo                take the last message and its answer back
/reset               forget all messages
/system TEXT         another system message, for the messages so far too; without TEXT: none
/save FILE           write the messages as JSON; without FILE: save the session now (it is saved after each answer too)
/save-session FOLDER save the session in a folder; m3jit chat --session FOLDER goes on with it
/context             how much of the context is taken
/exit                end (as Ctrl-D does)
//...                a message that begins with /"""
MAIN = "main"                       # the name of the conversation that was begun with
_NOTHING_MORE = {"length": "the answer has as many tokens as --max-tokens allows", "stop": "the answer has ended"}
_CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")
_EDIT = re.compile(r"(?s)(.*?)\s*=>\s?(.*)")


class Dialogue:
    """Takes lines, writes answers to standard output and everything else to standard error.

    terminal: somebody is there to read messages about a failed turn and to go on; otherwise it is raised.  single:
    whether keys can be read one by one (None: found out).  store: where the conversation is saved after each line that
    changed it."""

    def __init__(self, talk: Any, terminal: bool, single: bool | None = None, store: Any = None):
        self.talk, self.terminal = talk, terminal
        self.single = terminal and (keys.available() if single is None else single)
        self.forks: dict[str, Any] = {}                # conversations that wait, by name
        self.name, self.store, self._saved = MAIN, store, None
        self.interrupts = Interrupts()
        self._reader = keys.KeyReader(sys.stdin.fileno(), interrupted=self.interrupts.file) if self.single else None
        self.commands: dict[str, Callable[[str], bool | None]] = {
            "help": lambda _: note(HELP), "exit": lambda _: False, "quit": lambda _: False, "reset": self._reset,
            "undo": self._undo, "system": self._system, "save": self._save, "context": self._context,
            "edit": self._edit, "correct": self._correct, "continue": self._continue, "fork": self._fork,
            "switch": self._switch, "undo-correction": self._undo_correction, "save-session": self._save_session}

    def take(self, line: str) -> bool:
        """Answer a message or obey a command; False ends the conversation.  UserError, without a terminal.

        On a terminal the first Ctrl-C meanwhile stops an answer, or is left to whoever waits for the next line; the
        second raises KeyboardInterrupt."""
        with self.interrupts.taking() if self.terminal else contextlib.nullcontext():
            return self._take(line)

    def _take(self, line: str) -> bool:
        try:
            go_on = True
            if line.startswith("/") and not line.startswith("//"):
                go_on = self._obey(line)
            elif line.strip():
                self._answer(self.talk.say(line[1:] if line.startswith("//") else line), message=True)
            self._keep()
            return go_on
        except (UserError, OSError) as error:
            if not self.terminal:
                raise
            note(f"error: {explained(error)}")
        return True

    def begin(self) -> None:
        """Go on from what the store has."""
        if self.store is not None and MAIN in self.store.names():
            self.talk.load(self.store, MAIN)
            self._saved = self._state()
            note(f"[{len(self.talk.messages)} messages, {self.talk.used} tokens; "
                 f"{self.talk.session.waiting} to compute before the last answer could go on]")

    def _keep(self) -> None:
        """Save the conversation if there is a store and something has changed."""
        if self.store is not None and self._state() != self._saved:
            self.talk.save(self.store, self.name)
            self._saved = self._state()

    def _state(self) -> Any:
        return self.name, self.talk.transcript(), self.talk.session.tokens

    def close(self) -> None:
        """End all conversations."""
        for talk in (self.talk, *self.forks.values()):
            talk.close()
        self.interrupts.close()

    def _obey(self, line: str) -> bool:
        word, _, rest = line[1:].partition(" ")
        word, at, which = word.partition("@")
        command = self.commands.get(word)
        if command is None:
            raise UserError(f"no command /{brief(word)}; there are {', '.join('/' + name for name in self.commands)} "
                            "(a message that begins with / is written with //)")
        if at:
            if word != "edit" or not re.fullmatch("-?[0-9]{1,6}", which):
                raise UserError(f"/{word}@{brief(which)}: /edit@N OLD => NEW has a number behind the @")
            return self._edit(rest, int(which)) is not False
        return command(rest.strip()) is not False

    # Answers.

    def _answer(self, pieces: Iterator[str], begun: str = "", message: bool = False) -> None:
        """Show an answer as it comes; `begun`: what stands there already; message: it answers a new one.  A pause lets
        it be corrected."""
        while True:
            paused = self._show(pieces, begun, message)
            if not paused:
                return
            picker = self._pick()
            if picker is None:
                note("[stopped; /continue goes on]")
                return
            begun, message = self._apply(picker), False
            pieces = self.talk.resume()

    def _show(self, pieces: Iterator[str], begun: str, message: bool) -> bool:
        """Write pieces until they end; whether a pause was asked for, and keys can pick a place."""
        last, before, came = begun[-1:] or "\n", len(self.talk.messages), False
        if begun:
            self._say_again()
        with self._stoppable():
            for piece in pieces:
                last, came = piece, True
                self._write(piece)
        if (message or begun or came) and (not last.endswith("\n") or not self.terminal):
            self._end_line()
        reason = self.talk.finish_reason
        if message and reason == "cancelled" and not came and len(self.talk.messages) == before:
            note("[stopped before the answer began: the message is taken back]")
            return False
        if not (message or begun or came) and reason in _NOTHING_MORE:
            note(f"[nothing more: {_NOTHING_MORE[reason]}]")
            return False
        if reason == "context":
            note(f"[the context of {self.talk.context} tokens is full: the answer ends here; /undo or /reset makes "
                 "room]")
        elif reason == "cancelled":
            if self.single and self.talk.messages:
                return True
            hint = "; /edit OLD => NEW corrects it, /continue goes on" if self.terminal and self.talk.messages else ""
            note(f"[stopped{hint}]")
        elif reason == "length" and self.terminal:
            note("[as many tokens as --max-tokens allows]")
        return False

    def _say_again(self) -> None:
        """Show the answer so far."""
        self._write(self.talk.answer)
        self._shown(None)

    def _end_line(self) -> None:
        self._write("\n")
        self._shown("\n")

    def _shown(self, text: str | None) -> None:
        """What was shown beside the pieces of an answer is part of a recorded conversation; None: the answer so far."""
        if (course := getattr(self.talk, "course", None)) is not None:
            course.show(self.talk, text)

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(_CONTROLS.sub("\ufffd", text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """While inside, Esc and Ctrl-C stop the answer; a second Ctrl-C ends the command."""
        if not self.terminal:
            yield
            return
        with self.interrupts.answering(self.talk.stop), \
                keys.single_keys() if self.single else contextlib.nullcontext() as fd:
            watch = keys.Watch(fd, self._reader, self.talk.stop) if self.single else None
            try:
                yield
            finally:
                if watch is not None:
                    watch.close()

    # Corrections.

    def _pick(self) -> Picker | None:
        """The place and the text that keys give; None when the answer shall stay as it is."""
        picker = Picker(self.talk.answer)
        screen = Screen()

        def draw() -> None:
            screen.draw(picker.lines(screen.width))

        def again() -> None:                           # awake again: the shell has written below what was shown
            screen.drawn = 0
            draw()
        with self.interrupts.as_keys(), keys.single_keys(again, pastes=True):
            while True:
                draw()
                ended = picker.key(self._reader.key())
                if ended:
                    screen.clear()
                    return picker if ended == ACCEPT else None

    def _apply(self, picker: Picker) -> str:
        """Correct the answer as picked; its text up to where it goes on."""
        text = picker.typed.rstrip(" ")
        if not picker.moved and not text:
            return ""                                  # nothing is shown again
        kept = picker.text[:picker.place]
        if not text:
            kept = kept.rstrip(" ")                    # the next word brings its own space
        return self._corrected(text or None, self._end_of(kept))

    def _end_of(self, kept: str) -> dict[str, Any]:
        """The place behind a beginning of the answer."""
        return {"after_text": kept, "which": 1} if kept else {"to_token": self.talk.session.start}

    def _corrected(self, text: str | None, place: dict[str, Any]) -> str:
        """Correct the last answer, say what that took, and give its text so far."""
        session, talk = self.talk.session, self.talk
        before = len(session.tokens)
        taken = talk.correct(text, **place)
        injected = len(session.tokens) - before + taken
        kept = before - taken - session.start
        note(f"[corrected: {kept} tokens of the answer kept, {taken} taken back, {injected} put in; {session.waiting} "
             "to compute before it goes on]")
        return session.text

    def _edit(self, rest: str, which: int | None = None) -> None:
        found = _EDIT.fullmatch(rest)
        if found is None:
            raise UserError("/edit: write /edit OLD => NEW: a text of the last answer, and what goes in its place")
        old, new = found[1].strip(), found[2].strip()
        if not self.talk.messages:
            raise UserError("/edit: nothing has been said yet")
        text = self.talk.answer
        if not old:
            if not new:
                raise UserError("/edit: there is neither a place nor a text; /continue goes on with the answer")
            joined = " " + new if text and text[-1].isalnum() and new[0].isalnum() else new
            begun = self._corrected(joined, {})
        elif new:
            begun = self._corrected(new, {"to_text": old, "which": which})
        else:
            from m3jit.api.places import TokenText
            at = TokenText.of_text(text).find(old, which)
            begun = self._corrected(None, self._end_of(text[:at].rstrip(" ")))
        self._answer(self.talk.resume(), begun)

    def _correct(self, _: str) -> None:
        if not self.talk.messages:
            raise UserError("/correct: nothing has been said yet")
        if not self.single:
            raise UserError("/correct: needs a terminal whose keys can be read one by one; /edit OLD => NEW does the "
                            "same")
        picker = self._pick()
        if picker is not None:
            begun = self._apply(picker)
            self._answer(self.talk.resume(), begun)

    def _continue(self, _: str) -> None:
        if not self.talk.messages:
            raise UserError("/continue: nothing has been said yet")
        self._answer(self.talk.resume())

    def _undo_correction(self, _: str) -> None:
        if not self.talk.undo_correction():
            note("nothing has been corrected since the last message")
        else:
            self._say_again()
            self._end_line()

    # Other commands.

    def _fork(self, name: str) -> None:
        from m3jit.durable.store import MAX_NAME
        if not name:
            raise UserError("/fork: give it a name; /switch NAME goes on with it")
        size = len(name.encode("utf-8", "replace"))
        if size > MAX_NAME:
            raise UserError(f"/fork: a name has {MAX_NAME} bytes at most, and {brief(name)!r} has {size}")
        if name == self.name or name in self.forks:
            raise UserError(f"/fork: there is a conversation {brief(name)!r} already; /switch {brief(name)} goes on "
                            "with it")
        self.forks[name] = self.talk.fork()
        if self.store is not None:
            self.talk.save(self.store, name)

    def _switch(self, name: str) -> None:
        if name == self.name:
            return
        if name not in self.forks and self.store is not None and name in self.store.names():
            saved = self.talk.fork()
            try:
                saved.load(self.store, name)
            except BaseException:
                saved.close()
                raise
            self.forks[name] = saved
        if name not in self.forks:
            there = ("are " if self.forks else "is ") + ", ".join([self.name, *self.forks])
            raise UserError(f"/switch: no conversation {brief(name)!r}; there {there}")
        self.forks[self.name] = self.talk
        self.talk, self.name = self.forks.pop(name), name

    def _reset(self, _: str) -> None:
        self.talk.reset()

    def _undo(self, _: str) -> None:
        if not self.talk.undo():
            note("nothing has been said")

    def _system(self, text: str) -> None:
        self.talk.system = text or None

    def _save(self, name: str) -> None:
        if not name and self.store is not None:
            self.talk.save(self.store, self.name)
            self._saved = self._state()
            return
        if not name:
            raise UserError("/save: give it the name of a file, or begin with m3jit chat --session FOLDER")
        try:
            write_file(name, (json.dumps(self.talk.transcript(), ensure_ascii=False, indent=1) + "\n").encode())
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError(f"/save: {error.filename}: cannot be written: {error.strerror or error}; give the name of "
                            "another file") from None

    def _save_session(self, folder: str) -> None:
        if not folder:
            raise UserError("/save-session: give it the name of a folder")
        self.talk.save(folder, MAIN)

    def _context(self, _: str) -> None:
        note(f"{self.talk.used} of {self.talk.context} tokens")
