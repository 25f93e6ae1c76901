"""What the rows of `benchmarks.state` share: the models, and how times are summed up."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import language
from benchmarks.table import model_path

STATED = "stated"                       # the target of a figure that has no bound


@dataclass(frozen=True)
class Setup:
    """The options of the command, with the members that `benchmarks.language` and `benchmarks.table` expect."""
    model: str | None
    folder: str
    peer_python: str

    @property
    def smollm2(self) -> Path:
        """SmolLM2's file.  FileNotFoundError with what to do when there is none."""
        found = model_path(self)
        if found is None or not found.is_file():
            raise FileNotFoundError(f"no SmolLM2{f' at {self.model}' if self.model else ''}: give --smollm2 FILE, or "
                                    f"run `m3jit model get smollm2`")
        return found

    def llama(self, kind: str = "tinyllama-q4_k_m") -> Path:
        """A llama of 1.1B with random weights (`benchmarks.models.TYPES`), made when it is not there."""
        return language.made(self, kind)

    def mamba(self, name: str = "mamba-q8_0-130m") -> Path:
        """A Mamba with random weights (`benchmarks.mamba.MODELS`), made when it is not there."""
        from benchmarks import mamba
        path = Path(self.folder) / f"{name}.gguf"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            mamba.write(path, mamba.MODELS[name])
        return path


def p50_p99(seconds: list[float]) -> tuple[float, float]:
    """Median and 99th percentile (the smallest value that at least 99 of 100 do not exceed)."""
    return float(np.median(seconds)), float(np.percentile(seconds, 99, method="inverted_cdf"))


def micros(seconds: float) -> str:
    """A time in microseconds, as the table prints it."""
    return f"{1e6 * seconds:.1f} us"
