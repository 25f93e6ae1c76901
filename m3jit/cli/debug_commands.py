"""The commands of `m3jit debug`: words in, lines out.  What they do is in m3jit.timetravel."""
from __future__ import annotations

from typing import Any, Callable, Iterator

from m3jit.errors import UserError
from m3jit.frontend.errors import suggest
from m3jit.isa.types import Tensor
from m3jit.timetravel import views
from m3jit.timetravel.debugger import Debugger
from m3jit.timetravel.differences import difference
from m3jit.timetravel.engine import check_time
from m3jit.timetravel.turns import tree
from m3jit.vm.values import Handle

HELP = """\
  go     s step [N]    b back [N]             instructions
         t token [N]   bt [N]                 outputs: to behind the next STREAM, or the one before
         l layer [N]   bl [N]                 layers (labels layer_*; of other programs every label)
         c continue    rc reverse             to the next stop, or the one before
         go TIME                              to a number of instructions (of all contexts)
  stop   break PLACE                          FILE:LINE, LINE, LABEL, LABEL+N, 0xPC or a mnemonic
         watch rX | ADDRESS BYTES             behind an instruction that changed it
         stops    delete N
  show   where  list  regs  frames  contexts  snapshots  output
         print rX    picture rX    context N
         memory ADDRESS [BYTES]    state S0 [LAYER]
  compare  mark NAME    diff A [B]            versions: now, @TIME, #SNAPSHOT, a mark
  quit   help   an empty line repeats the last command"""
MOST_BYTES = 4096


class Commands:
    """Executes lines for a debugger.  `run` gives the lines to show; UserError: what is wrong with a command."""

    def __init__(self, debugger: Debugger):
        self.debugger, self.vm, self.engine = debugger, debugger.vm, debugger.engine
        self.done = False
        self.chosen: int | None = None                 # a context that is looked at instead of the next one
        self._last = ""
        self._table: dict[str, Callable[[str], Iterator[str]]] = {}
        for names, function in (
                ("s step", self._step), ("b back", self._back), ("t token", self._token), ("bt", self._token_back),
                ("l layer", self._layer), ("bl", self._layer_back), ("c continue", self._continue),
                ("rc reverse", self._reverse), ("go", self._go), ("break", self._break), ("watch", self._watch),
                ("stops", self._stops), ("delete", self._delete), ("where", self._where), ("list", self._list),
                ("regs", self._regs), ("frames", self._frames), ("contexts", self._contexts),
                ("context", self._context), ("snapshots", self._snapshots), ("output", self._output),
                ("print", self._print), ("picture", self._picture), ("memory", self._memory), ("state", self._state),
                ("mark", self._mark), ("diff", self._diff), ("help", self._help), ("quit exit q", self._quit)):
            for name in names.split():
                self._table[name] = function

    @property
    def context(self) -> Any:
        """The context that is looked at."""
        if self.chosen is not None:
            return self.debugger.find_context(self.chosen)
        return self.debugger.context

    def begin(self) -> Iterator[str]:
        """What there is to show before the first command."""
        yield from self._written(0)
        yield from self._where("")

    def run(self, line: str) -> Iterator[str]:
        """Execute one line."""
        line = line.strip() or self._last
        self._last = line
        word, _, rest = line.partition(" ")
        if not word:
            return
        function = self._table.get(word)
        if function is None:
            hint = suggest(word, self._table)
            raise UserError(f"no command {word!r}" + (f"; {hint}" if hint else "; `help` lists them"))
        yield from function(rest.strip())

    # -- going ------------------------------------------------------------------------------------------------------
    def _moved(self, action: Callable[[], Any]) -> Iterator[str]:
        """Move, then say what was written on the way forward, and where the run is."""
        before, self.chosen = self.engine.history.at, None
        said = action()
        yield from self._written(before)
        if isinstance(said, str) and said:
            yield said
        yield from self._where("")

    def _written(self, since: int) -> Iterator[str]:
        for item in self.engine.history.outputs(since):
            yield f"  wrote {item}" if item.form else f"  {item}"

    def _step(self, rest: str) -> Iterator[str]:
        return self._moved(lambda: self.engine.step(_count(rest)) and None)

    def _back(self, rest: str) -> Iterator[str]:
        return self._moved(lambda: self.engine.back(_count(rest)) and None)

    def _token(self, rest: str) -> Iterator[str]:
        return self._moved(lambda: "" if self.debugger.outputs(_count(rest)) else "no more outputs")

    def _token_back(self, rest: str) -> Iterator[str]:
        return self._moved(lambda: "" if self.debugger.outputs(-_count(rest)) else "no output before")

    def _layer(self, rest: str) -> Iterator[str]:
        return self._moved(lambda: "" if self.debugger.layers(_count(rest)) else "no more of them")

    def _layer_back(self, rest: str) -> Iterator[str]:
        return self._moved(lambda: "" if self.debugger.layers(-_count(rest)) else "none before")

    def _continue(self, rest: str) -> Iterator[str]:
        return self._moved(lambda: self.debugger.go_on())

    def _reverse(self, rest: str) -> Iterator[str]:
        return self._moved(lambda: self.debugger.go_back())

    def _go(self, rest: str) -> Iterator[str]:
        return self._moved(lambda: self.engine.go(check_time(rest)))

    # -- stops ------------------------------------------------------------------------------------------------------
    def _break(self, rest: str) -> Iterator[str]:
        number, made = self.debugger.add_break(_needed(rest, "a place: FILE:LINE, LINE, LABEL, 0xPC or a mnemonic"))
        at = ", ".join(f"0x{pc:04x}" for pc in sorted(made.pcs)[:6]) + (" .." if len(made.pcs) > 6 else "")
        yield f"breakpoint {number}: {made.text} ({at})"

    def _watch(self, rest: str) -> Iterator[str]:
        number, made = self.debugger.add_watch(_needed(rest, "a register, or an address and a number of bytes"))
        yield f"watchpoint {number}: {made.text} in context {made.context.id}"

    def _stops(self, rest: str) -> Iterator[str]:
        for number, made in self.debugger.breakpoints.items():
            yield f"breakpoint {number}: {made.text}"
        for number, watch in self.debugger.watches.items():
            yield f"watchpoint {number}: {watch.text} in context {watch.context.id}"
        if not self.debugger.breakpoints and not self.debugger.watches:
            yield "no breakpoints and no watchpoints"

    def _delete(self, rest: str) -> Iterator[str]:
        self.debugger.delete(_count(_needed(rest, "the number of a breakpoint or watchpoint")))
        yield from self._stops("")

    # -- showing ----------------------------------------------------------------------------------------------------
    def _where(self, rest: str) -> Iterator[str]:
        if self.engine.ended is not None and self.chosen is None:
            yield f"@{self.engine.time} the end: {self.engine.ended}"
        else:
            yield views.position(self.vm, self.context if self.chosen else self.engine.upcoming, self.engine.time)

    def _list(self, rest: str) -> Iterator[str]:
        yield from views.listing(self.vm, self.context, self.debugger.pcs)

    def _regs(self, rest: str) -> Iterator[str]:
        yield from views.registers(self.vm, self.context)

    def _frames(self, rest: str) -> Iterator[str]:
        yield from views.frames(self.vm, self.context)

    def _contexts(self, rest: str) -> Iterator[str]:
        yield from views.contexts(self.vm, self.engine.contexts, self.engine.upcoming)

    def _context(self, rest: str) -> Iterator[str]:
        found = self.debugger.find_context(_count(_needed(rest, "the number of a context")))
        self.chosen = found.id
        yield from self._where("")

    def _snapshots(self, rest: str) -> Iterator[str]:
        yield from views.snapshot_tree(self.vm, self.engine.contexts)
        yield from tree(self.engine.history)

    def _output(self, rest: str) -> Iterator[str]:
        yield from (str(item) for item in self.engine.history.outputs(0))

    def _value(self, rest: str) -> Any:
        return self.context.read(self.vm.register(_needed(rest, "a register")))

    def _print(self, rest: str) -> Iterator[str]:
        value = self._value(rest)
        yield f"{rest} = {views.brief_value(value, self.context)}"
        if isinstance(value, Tensor) and value.size > views.FEW:
            yield from views.picture(value)

    def _picture(self, rest: str) -> Iterator[str]:
        value = self._value(rest)
        if not isinstance(value, Tensor):
            found = views.brief_value(value, self.context)
            raise UserError(f"{rest} holds {found}; there are pictures of tensors only")
        yield from views.picture(value)

    def _memory(self, rest: str) -> Iterator[str]:
        address, _, length = rest.partition(" ")
        size = _number(length or "64")
        if not 0 < size <= MOST_BYTES:
            raise UserError(f"{size} bytes; 1 to {MOST_BYTES} are shown")
        yield from views.memory(self.context, _number(_needed(address, "an address")), size)

    def _state(self, rest: str) -> Iterator[str]:
        name, _, layer = rest.partition(" ")
        handle = self.context.read(self.vm.register(_needed(name, "an S register")))
        if not isinstance(handle, Handle):
            raise UserError(f"{name} names no state")
        state = self.context.states.get(handle.id)
        yield f"{name} = {views.brief_value(handle, self.context)}"
        if layer and hasattr(state, "rows"):
            for what, rows in zip(("keys", "values"), state.rows(_number(layer))):
                if rows.size:
                    yield f"{what} {list(rows.shape)} {views.statistics(rows)}"
                    yield from views.picture(Tensor.of(rows))

    # -- comparing --------------------------------------------------------------------------------------------------
    def _mark(self, rest: str) -> Iterator[str]:
        found = self.debugger.mark(_needed(rest, "a name"))
        yield f"{rest}: context {found.context} at @{found.time}"

    def _diff(self, rest: str) -> Iterator[str]:
        first, _, second = _needed(rest, "one version or two: now, @TIME, #SNAPSHOT, a mark").partition(" ")
        a, b = self.debugger.version(first), self.debugger.version(second.strip() or "now")
        found = difference(a.root, b.root, self.vm.image.program)
        yield f"{a.name} -> {b.name}: {'equal' if not found else ''}".rstrip()
        yield from (f"  {line}" for line in found)

    def _help(self, rest: str) -> Iterator[str]:
        yield HELP

    def _quit(self, rest: str) -> Iterator[str]:
        self.done = True
        return iter(())


def _needed(text: str, what: str) -> str:
    if not text:
        raise UserError(f"the command wants {what}")
    return text


def _number(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        raise UserError(f"{text!r} is no number") from None


def _count(text: str) -> int:
    """How many; 1 when nothing is said."""
    number = _number(text) if text else 1
    if number < 1:
        raise UserError(f"{number}: a number from 1 is expected")
    return number
