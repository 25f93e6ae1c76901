"""What the host adds to a program token by token, as a log keeps it: stop strings, log-probabilities, a grammar.

The host looks at every token of a hosted program (m3jit.models.hosted).  What it does is a function of the tokens, of
the model's tokeniser and of what is kept here; so a replay does it again and compares.  A grammar is kept as its text;
the library that turns it into masks is named with its version, for another version may allow other tokens.
"""
from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from m3jit.errors import UnsupportedError, UserError
from m3jit.timetravel.log_file import LogError

LIBRARY = "llguidance"
TOKENS = "TOKENS"
SINKS = (TOKENS, "LOGPROBS", "MARKS")                  # that the host of a hosted program attaches


@dataclass(frozen=True)
class Steering:
    """model: the reference of the model whose tokens they are.  grammar: kind and text ("" and "": none); library: the
    version of the library of grammars ("" without one)."""
    model: str
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    grammar: tuple[str, str] = ("", "")
    library: str = ""

    @classmethod
    def made(cls, model: str, settings: Any) -> "Steering":
        """That of checked `Settings` (m3jit.api.generation)."""
        grammar = settings.grammar
        return cls(model, tuple(settings.stop or ()), settings.logprobs,
                   (grammar.kind, grammar.text) if grammar is not None else ("", ""),
                   library_version() if grammar is not None else "")

    @classmethod
    def of(cls, head: dict[str, Any], path: str) -> "Steering | None":
        """That of a log's head; None: nothing was steered.  LogError: it is none."""
        kept = head.get("steering")
        if kept is None:
            return None
        try:
            found = cls(**kept)
            grammar = found.grammar
            good = all(isinstance(t, str) for t in (found.model, found.library, *found.stop, *grammar)) and \
                len(grammar) == 2 and isinstance(found.stop, tuple) and \
                (found.logprobs is None or type(found.logprobs) is int)
        except TypeError:
            good = False
        if not good:
            raise LogError(f"{path}: does not say how its text was steered; another program made the file, or it is "
                           f"damaged")
        return found

    def kept(self) -> dict[str, Any]:
        """As a log's head has it."""
        return asdict(self)

    def check_library(self, path: str, any_version: bool = False) -> None:
        """UnsupportedError: there is a grammar, and its library is not there; UserError: it has another version than it
        had."""
        if not self.grammar[0]:
            return
        try:
            here = library_version()
        except UnsupportedError as error:
            raise UnsupportedError(f"{path}: was written under a grammar: {error}") from None
        if here != self.library and not any_version:
            raise UserError(f"{path}: was written under a grammar of {LIBRARY} {self.library}, {here} is installed; "
                            f"another version may allow other tokens. Install it (pip install "
                            f"{LIBRARY}=={self.library}), or try --any-version, which says where the texts part")

    def matcher(self, models: Any, path: str, any_version: bool = False) -> Any:
        """The grammar at its start, None without one.  models: the provider.  Raises as `check_library`."""
        self.check_library(path, any_version)
        if not self.grammar[0]:
            return None
        from m3jit.models.grammar import Grammar, TokenGrammars
        model = models.load(self.model)
        rows = int(model.tensor("token_embd.weight").shape[0])
        return TokenGrammars(model.tokenizer, rows).matcher(Grammar(*self.grammar))

    def extensions(self, models: Any, path: str, any_version: bool = False) -> Any:
        """The extensions of the machine.  Raises as `matcher`."""
        from m3jit.models.grammar import registry
        return registry(self.matcher(models, path, any_version))


def library_version() -> str:
    """The version of the library of grammars.  UnsupportedError: it is not there."""
    from importlib.metadata import version

    from m3jit.models.grammar import library
    library()
    return version(LIBRARY)
