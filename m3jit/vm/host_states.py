"""The host's side of a machine's states: the values that S registers name, taken out and put in."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from m3jit.errors import UserError
from m3jit.isa.fields import STATE, Reg
from m3jit.vm.context import Context

if TYPE_CHECKING:
    from m3jit.vm.machine import Machine


class HostStates:
    """The part of `VM` that hands states (key/value streams, recurrent states, ...) to the host and takes them.

    States are immutable values: what is handed out does not change when the machine goes on, and one value may be
    given to any number of machines.  Neither direction copies anything."""
    main: Context
    machine: "Machine"

    def state(self, name: str | Reg, context: Context | None = None) -> Any:
        """The state that an S register names; None when it names none.  UserError: no S register."""
        reg = self._state_register(name)
        with self._entered():                          # type: ignore[attr-defined]
            return self.machine.state_of(context or self.main, reg.index)

    def set_state(self, name: str | Reg, value: Any, context: Context | None = None) -> None:
        """Give the state that an S register names this value; a register that names none gets a new state.  None: the
        state ends, and the register names none.

        The value is one that `state` gave, of this machine or another one.  UserError: no S register, or no state."""
        reg = self._state_register(name)
        if value is not None and not hasattr(type(value), "kind_name"):
            raise UserError(f"{name}: a state that `VM.state` gave is expected, got {type(value).__name__}")
        with self._entered():                          # type: ignore[attr-defined]
            target = context or self.main
            if value is not None:
                self.machine.set_state_of(target, reg.index, value)
            elif target.S[reg.index] is not None:
                target.states.delete(target.S[reg.index].id)
                target.S[reg.index] = None

    def states(self, *kinds: type) -> dict[str, Any]:
        """The states of these classes (none given: all) that S registers of the main context name, by the registers'
        numbers (S0, ...)."""
        with self._entered():                          # type: ignore[attr-defined]
            main, state_of = self.main, self.machine.state_of
            return {f"S{n}": value for n, handle in enumerate(main.S[:main.used.S]) if handle is not None
                    and isinstance(value := state_of(main, n), kinds or object)}

    def _state_register(self, name: str | Reg) -> Reg:
        reg: Reg = self.register(name)                 # type: ignore[attr-defined]
        if reg.bank != STATE:
            raise UserError(f"{name}: is {reg}, which holds no state; states are in S0 to S63")
        return reg
