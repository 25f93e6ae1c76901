"""Counters and histograms in Prometheus's text format."""
from __future__ import annotations

import bisect
import threading
from typing import Callable, Sequence

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Histogram:
    """Counts of values up to each bound."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds, self.counts, self.sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> list[str]:
        out, total = [], 0
        for bound, count in zip((*(f"{b:g}" for b in self.bounds), "+Inf"), self.counts):
            total += count
            out.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*out, f"{name}_sum {self.sum:.6g}", f"{name}_count {total}"]


class Metrics:
    """Everything `GET /metrics` shows.  Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, int], int] = {}
        self._counters: dict[str, tuple[str, int]] = {
            "m3jit_prompt_tokens_total": ("Prompt tokens of texts that began.", 0),
            "m3jit_prompt_tokens_reused_total": ("Those of them that were known and not computed.", 0),
            "m3jit_generated_tokens_total": ("Tokens generated.", 0),
            "m3jit_texts_total": ("Texts that ended, also by an error.", 0),
            "m3jit_cancelled_total": ("Texts ended because their client went away or the server stopped.", 0),
            "m3jit_rejected_total": ("Requests refused because the queue was full.", 0),
            "m3jit_edits_total": ("Responses that were edited.", 0),
            "m3jit_restarted_total": ("Texts that began again where they were: a round of the batch failed, or "
                                      "memory was made.", 0)}
        self._read: dict[str, tuple[str, str, Callable[[], int]]] = {}
        self._histograms = {
            "m3jit_request_seconds": ("From a request's arrival to the end of its text.", Histogram(SECONDS)),
            "m3jit_first_token_seconds": ("From a request's arrival to its first token.", Histogram(SECONDS)),
            "m3jit_queue_seconds": ("Time in the queue.", Histogram(SECONDS)),
            "m3jit_token_seconds": ("Between two tokens of one text.", Histogram(SECONDS)),
            "m3jit_batch_size": ("Texts that were generated together, by round.", Histogram(SIZES))}

    def request(self, path: str, status: int) -> None:
        """A request was answered."""
        with self._lock:
            self._requests[path, status] = self._requests.get((path, status), 0) + 1

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            text, value = self._counters[name]
            self._counters[name] = text, value + amount

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        with self._lock:
            self._histograms[name][1].add(value)

    def watch(self, name: str, text: str, read: Callable[[], int], kind: str = "gauge") -> None:
        """A number that is read when it is shown.  kind: gauge or counter."""
        self._read[name] = (text, kind, read)

    def text(self) -> str:
        """The exposition format, version 0.0.4."""
        with self._lock:
            out = ["# HELP m3jit_requests_total Requests answered, by path and status.",
                   "# TYPE m3jit_requests_total counter"]
            out += [f'm3jit_requests_total{{path="{path}",status="{status}"}} {n}'
                    for (path, status), n in sorted(self._requests.items())]
            for name, (text, value) in self._counters.items():
                out += [f"# HELP {name} {text}", f"# TYPE {name} counter", f"{name} {value}"]
            for name, (text, histogram) in self._histograms.items():
                out += [f"# HELP {name} {text}", f"# TYPE {name} histogram", *histogram.lines(name)]
        for name, (text, kind, read) in self._read.items():
            out += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {read()}"]
        return "\n".join(out) + "\n"
