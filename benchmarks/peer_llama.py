"""llama.cpp as a peer: a thin low-level wrapper and the measurement of its speed at its best setting.

Runs wherever llama-cpp-python is installed (extra `bench`, or an environment of its own); imports nothing of m3jit. The
measured loop calls llama_decode and takes the argmax of the returned logits pointer: no sampler, no text, no copies.

    python benchmarks/peer_llama.py MODEL.gguf [--threads 2 --threads 1] [--json | --serve]

Build the peer natively, or the comparison is unfair:

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36

TRAP: a child process inherits the CPU affinity of its parent. A benchmark that pins itself to one core and then starts
this one measures two peer threads on one core; affinity is therefore reported, and fewer CPUs than threads are refused.
TRAP: its OpenMP threads spin. With another job on the cores they lose up to 90 % of their speed, and OMP_WAIT_POLICY,
OMP_PROC_BIND or GOMP_SPINCOUNT in the environment change the figures: leave them unset and the machine quiet.
"""
from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

try:
    import llama_cpp as lc
except (ImportError, OSError, RuntimeError) as error:  # OSError, RuntimeError: installed, but its library does not load
    lc = None
    UNAVAILABLE = f"{type(error).__name__}: {error}"
else:
    UNAVAILABLE = ""

EXIT_NO_PEER, EXIT_REFUSED = 3, 4
KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}  # ggml_type numbers
PROMPT_SHORT, GENERATED, PROMPT_LONG = 16, 48, 128
SEQUENCES = 8                                # of one batch
DEEP, DEEP_GENERATED = 4096, 16              # a long context, and tokens timed behind it
_KEEP: list[Any] = []  # the log callback must outlive every call into the library


class Setting(NamedTuple):
    """One way to run the peer's attention."""

    flash: bool
    kv_type: str

    def __str__(self) -> str:
        return f"flash attention {'on' if self.flash else 'off'}, {self.kv_type} cache"


# llama.cpp takes a quantised value cache with flash attention only
SETTINGS = (
    Setting(False, "f16"), Setting(False, "f32"), Setting(True, "f16"), Setting(True, "f32"), Setting(True, "q8_0"),
)


class PeerError(RuntimeError):
    """The peer cannot be used as asked; the message says what to change."""


def require_peer() -> None:
    """Raise PeerError when llama_cpp is missing, naming the command that installs it."""
    if lc is None:
        raise PeerError(
            f"llama_cpp cannot be imported in {sys.executable} ({UNAVAILABLE}); install the peer there with "
            'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python==0.3.36, or use the environment that has it'
        )


def quiet() -> None:
    """Drop llama.cpp's log; it writes hundreds of lines to stderr on each load."""
    if not _KEEP:
        _KEEP.append(lc.llama_log_callback(lambda level, text, user: None))
        lc.llama_log_set(_KEEP[0], ctypes.c_void_p(0))
        lc.llama_backend_init()


def system_info() -> str:
    """llama.cpp's own line of compiled CPU features; reads 'AVX512_VNNI = 1' on a native build where the CPU has it."""
    return lc.llama_print_system_info().decode().strip()


class LlamaPeer:
    """One model file opened by llama.cpp on the CPU; contexts are made from it with `context`."""

    def __init__(self, path: Path | str) -> None:
        require_peer()
        quiet()
        self.path = path
        if not Path(path).is_file():
            raise PeerError(f"{path}: no such model file; pass the path of a .gguf file")
        parameters = lc.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = lc.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.model:
            raise PeerError(f"{path}: llama.cpp could not load this file; check that it is a complete GGUF model")
        self.vocab = lc.llama_model_get_vocab(self.model)
        self.n_vocab = lc.llama_vocab_n_tokens(self.vocab)

    def close(self) -> None:
        lc.llama_model_free(self.model)

    def tokenize(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of `text`; add_special adds BOS/EOS only where the model's metadata asks for them."""
        raw = text.encode()
        capacity = len(raw) + 8
        out = (lc.llama_token * capacity)()
        count = lc.llama_tokenize(self.vocab, raw, len(raw), out, capacity, add_special, parse_special)
        if count < 0:
            raise PeerError(f"llama_tokenize wants {-count} tokens for {len(raw)} bytes, more than one a byte")
        return list(out[:count])

    def piece(self, token: int) -> bytes:
        """The bytes one token stands for; control tokens appear as written in the vocabulary."""
        buffer = ctypes.create_string_buffer(512)
        size = lc.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, True)
        if size < 0:
            raise PeerError(f"token {token} is {-size} bytes long, more than the {len(buffer)} expected at most")
        return buffer.raw[:size]

    def is_end(self, token: int) -> bool:
        """Whether llama.cpp stops generation at this token."""
        return bool(lc.llama_vocab_is_eog(self.vocab, token))

    @contextlib.contextmanager
    def context(
        self, threads: int, size: int = 512, flash: bool = False, batch: int = 512, kv_type: str = "f16",
        sequences: int = 1
    ) -> Iterator[PeerContext]:
        """A fresh context for `size` tokens, freed at the end of the block; an f16 cache is the peer's default.  Each
        of several sequences gets its share of the size, in a cache of its own (the peer's default)."""
        parameters = lc.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = size, batch, batch
        parameters.n_seq_max = sequences
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = lc.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else lc.LLAMA_FLASH_ATTN_TYPE_DISABLED
        parameters.type_k = parameters.type_v = KV_TYPES[kv_type]
        parameters.no_perf = True
        handle = lc.llama_init_from_model(self.model, parameters)
        if not handle:
            raise PeerError(f"llama.cpp could not make a context of {size} tokens with flash attention {flash}")
        try:
            yield PeerContext(handle, self.n_vocab)
        finally:
            lc.llama_free(handle)


class PeerContext:
    """A key/value cache of llama.cpp; positions advance with each decode."""

    def __init__(self, handle: Any, n_vocab: int) -> None:
        self.handle, self.n_vocab = handle, n_vocab
        self.kept, self.first = 0, 0                 # positions a measurement left for the next, the token behind them

    def clear(self) -> None:
        """Forget all positions."""
        self.kept = 0
        lc.llama_memory_clear(lc.llama_get_memory(self.handle), True)

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        """Feed tokens and return a view (no copy) of the float32 logits (vocab,) of the last one.

        The view is overwritten by the next call.
        """
        array = (lc.llama_token * len(tokens))(*tokens)
        status = lc.llama_decode(self.handle, lc.llama_batch_get_one(array, len(tokens)))
        if status != 0:
            raise PeerError(f"llama_decode of {len(tokens)} tokens answered {status}; the context may be full")
        return np.ctypeslib.as_array(lc.llama_get_logits_ith(self.handle, -1), shape=(self.n_vocab,))

    def decode_batch(self, batch: Any, rows: Sequence[tuple[int, int, int]], ask: Sequence[int]) -> list[int]:
        """Feed (token, position, sequence) rows in one call; the likeliest next token behind each row of `ask`."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, 0
            batch.seq_id[i][0] = sequence
        for i in ask:
            batch.logits[i] = 1
        status = lc.llama_decode(self.handle, batch)
        if status != 0:
            raise PeerError(f"llama_decode of {len(rows)} tokens answered {status}; the context may be full")
        return [int(np.ctypeslib.as_array(lc.llama_get_logits_ith(self.handle, i), shape=(self.n_vocab,)).argmax())
                for i in ask]

    def decode_all(self, tokens: Sequence[int]) -> np.ndarray:
        """Feed tokens from position 0 of a cleared context; a copy of the logits of every position (tokens, vocab)."""
        count = len(tokens)
        batch = lc.llama_batch_init(count, 0, 1)
        try:
            batch.n_tokens = count
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
                batch.seq_id[i][0] = 0
            status = lc.llama_decode(self.handle, batch)
        finally:
            lc.llama_batch_free(batch)
        if status != 0:
            raise PeerError(f"llama_decode of {count} tokens answered {status}; the context may be too small")
        return np.ctypeslib.as_array(lc.llama_get_logits(self.handle), shape=(count, self.n_vocab)).copy()


def fixed_tokens(count: int, n_vocab: int) -> list[int]:
    """A reproducible prompt of ordinary token ids; speed does not depend on which they are."""
    return [300 + (i * 7919) % (n_vocab - 300) for i in range(count)]


def generate_rate(context: PeerContext) -> float:
    """Tokens/s of 48 greedy tokens after a 16-token prompt; the prompt is not timed."""
    context.clear()
    logits = context.decode(fixed_tokens(PROMPT_SHORT, context.n_vocab))
    start = time.perf_counter()
    for _ in range(GENERATED):
        logits = context.decode((int(logits.argmax()),))
    return GENERATED / (time.perf_counter() - start)


def prompt_rate(context: PeerContext) -> float:
    """Tokens/s of a 128-token prompt in one batch, logits of the last position only."""
    context.clear()
    tokens = fixed_tokens(PROMPT_LONG, context.n_vocab)
    start = time.perf_counter()
    context.decode(tokens)
    return PROMPT_LONG / (time.perf_counter() - start)


def deep_rate(context: PeerContext) -> float:
    """Tokens/s of 16 greedy tokens behind 4,096; these are decoded once and kept between the samples."""
    if context.kept != DEEP:
        context.clear()
        tokens = fixed_tokens(DEEP, context.n_vocab)
        for at in range(0, DEEP, PROMPT_LONG):
            logits = context.decode(tokens[at:at + PROMPT_LONG])
        context.kept, context.first = DEEP, int(logits.argmax())
    else:
        lc.llama_memory_seq_rm(lc.llama_get_memory(context.handle), -1, DEEP, -1)
    token = context.first
    start = time.perf_counter()
    for _ in range(DEEP_GENERATED):
        token = int(context.decode((token,)).argmax())
    return DEEP_GENERATED / (time.perf_counter() - start)


def batch_rate(context: PeerContext) -> float:
    """Tokens/s of 48 greedy tokens of each of 8 sequences in one batch, after 16-token prompts that are not timed."""
    context.clear()
    prompts = [fixed_tokens(PROMPT_SHORT + i, context.n_vocab)[i:] for i in range(SEQUENCES)]
    batch = lc.llama_batch_init(SEQUENCES * PROMPT_SHORT, 0, 1)
    try:
        tokens = context.decode_batch(batch, [(t, at, s) for s, p in enumerate(prompts) for at, t in enumerate(p)],
                                      [s * PROMPT_SHORT + PROMPT_SHORT - 1 for s in range(SEQUENCES)])
        start = time.perf_counter()
        for step in range(GENERATED):
            rows = [(t, PROMPT_SHORT + step, s) for s, t in enumerate(tokens)]
            tokens = context.decode_batch(batch, rows, range(SEQUENCES))
        return SEQUENCES * GENERATED / (time.perf_counter() - start)
    finally:
        lc.llama_batch_free(batch)


SHORT_RATES = {"generate": generate_rate, "prompt": prompt_rate}
RATES = {**SHORT_RATES, "deep": deep_rate, "batch": batch_rate}


class PeerSpeed:
    """Takes samples of one model's speed, each at the setting that was best in a trial of its own.

    Settings are flash attention on and off with f16 and f32 key/value caches, and flash attention with a q8_0 cache.
    The trial's samples choose the setting and are then dropped, so that the medians are not of the luckiest runs.
    Raises PeerError when the process may run on fewer CPUs than threads, and when a trial does not end in TRIAL_LIMIT.
    """

    TRIALS = 3
    TRIAL_LIMIT = 120.0  # seconds; with spinning threads on busy cores a trial would otherwise take many minutes

    def __init__(self, path: Path | str) -> None:
        self.peer = LlamaPeer(path)
        self.stack = contextlib.ExitStack()
        self.contexts: dict[tuple[int, Setting, str], PeerContext] = {}
        self.chosen: dict[tuple[str, int], Setting] = {}
        self.trial: dict[tuple[str, int], dict[str, float]] = {}

    def close(self) -> None:
        self.stack.close()
        self.peer.close()

    def context(self, threads: int, setting: Setting, kind: str) -> PeerContext:
        shape = kind if kind not in SHORT_RATES else "short"
        key = (threads, setting, shape)
        if key not in self.contexts:
            sequences = SEQUENCES if kind == "batch" else 1
            size = DEEP + 64 if kind == "deep" else 256 * sequences
            made = self.peer.context(threads, size, setting.flash, batch=PROMPT_LONG, kv_type=setting.kv_type,
                                     sequences=sequences)
            context = self.contexts[key] = self.stack.enter_context(made)
            rates = SHORT_RATES.values() if shape == "short" else (RATES[kind],)
            for rate in rates:                          # maps the file, starts the threads
                rate(context)
        return self.contexts[key]

    def select(self, kind: str, threads: int) -> Setting:
        """The setting with the best median of the trial; settings take turns, so a slow minute hits all."""
        if (kind, threads) not in self.chosen:
            allowed = len(os.sched_getaffinity(0))
            if threads > allowed:
                raise PeerError(
                    f"{threads} threads asked for, but this process may use {allowed} CPU(s): its parent pinned it; "
                    "start it under `taskset -c 0-N`, or do not pin the parent"
                )
            settings = [s for s in SETTINGS if kind != "deep" or s.kv_type != "f32"]    # deep: a prefill each
            limit = self.TRIAL_LIMIT * (3 if kind == "deep" else 1)
            samples: dict[Setting, list[float]] = {setting: [] for setting in settings}
            start = time.monotonic()
            for _ in range(self.TRIALS):
                for setting, taken in samples.items():
                    taken.append(RATES[kind](self.context(threads, setting, kind)))
                    if time.monotonic() - start > limit:
                        raise PeerError(
                            f"the trial of settings for {kind} at {threads} threads took over {limit:.0f} s "
                            f"({taken[-1]:.1f} tok/s, load average {os.getloadavg()[0]:.1f}): the peer's spinning "
                            "threads need the cores to themselves; measure on a quiet machine"
                        )
            medians = {setting: statistics.median(taken) for setting, taken in samples.items()}
            self.chosen[kind, threads] = max(medians, key=medians.__getitem__)
            self.trial[kind, threads] = {str(setting): round(rate, 2) for setting, rate in medians.items()}
        return self.chosen[kind, threads]

    def sample(self, kind: str, threads: int) -> float:
        """One measurement in tokens/s; kind is one of RATES."""
        return RATES[kind](self.context(threads, self.select(kind, threads), kind))

    def about(self) -> dict[str, Any]:
        """What is measured, by which build, on which CPUs."""
        return {
            "peer": f"llama-cpp-python {lc.__version__}", "system_info": system_info(),
            "cpus_allowed": len(os.sched_getaffinity(0)), "load_average": os.getloadavg()[0],
            "model": Path(self.peer.path).name,
            "prompt_tokens": PROMPT_LONG, "generate_tokens": GENERATED,
        }


def measure(path: Path | str, threads: Sequence[int] = (2, 1), rounds: int = 5) -> dict[str, Any]:
    """Median, best and worst tokens/s over `rounds` for each thread count and kind, with the setting that was used."""
    speed = PeerSpeed(path)
    results = []
    try:
        for count in threads:
            row: dict[str, Any] = {"threads": count}
            for kind in SHORT_RATES:
                setting = speed.select(kind, count)
                samples = [speed.sample(kind, count) for _ in range(rounds)]
                row[kind] = {
                    "tokens_per_second": statistics.median(samples), "best": max(samples), "worst": min(samples),
                    "setting": str(setting), "trial": speed.trial[kind, count],
                }
            results.append(row)
        return {**speed.about(), "rounds": rounds, "results": results}
    finally:
        speed.close()


def serve(path: Path | str) -> None:
    """Answer each line `generate THREADS` (or `prompt`, `deep`, `batch`) on stdin with one JSON line, until stdin ends.

    This lets a benchmark alternate with a peer that stays loaded: the first line sent back is `about()`, and the answer
    to the first request of a kind comes after its trial of the settings.
    """
    speed = PeerSpeed(path)
    try:
        print(json.dumps(speed.about()), flush=True)
        for line in sys.stdin:
            kind, _, count = line.strip().partition(" ")
            if kind not in RATES or not count.isdigit() or int(count) < 1:
                raise PeerError(f"request {line.strip()!r} is not one of {', '.join(f'{k} THREADS' for k in RATES)}")
            rate = speed.sample(kind, int(count))
            answer = {"kind": kind, "threads": int(count), "tokens_per_second": rate}
            print(json.dumps({**answer, "setting": str(speed.chosen[kind, int(count)])}), flush=True)
    finally:
        speed.close()


def print_table(report: dict[str, Any]) -> None:
    """The report of `measure` for a reader."""
    print(f"{report['peer']}, {report['model']}\n{report['system_info']}")
    for row in report["results"]:
        for kind, length in (("generate", GENERATED), ("prompt", PROMPT_LONG)):
            taken = row[kind]
            print(
                f"{row['threads']} thread(s)  {kind:8} {length:>3} tokens: "
                f"{taken['tokens_per_second']:7.1f} tok/s median "
                f"({taken['worst']:.1f}..{taken['best']:.1f}), {taken['setting']}"
            )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure llama.cpp's tokens per second at its best setting.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, action="append", help="thread count (repeatable; default 2 and 1)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout instead of a table")
    parser.add_argument("--serve", action="store_true", help="stay loaded and answer 'generate N' and 'prompt N' lines")
    options = parser.parse_args(arguments)
    try:
        require_peer()
    except PeerError as error:
        print(f"peer_llama: {error}", file=sys.stderr)
        return EXIT_NO_PEER
    try:
        if options.serve:
            serve(options.model)
            return 0
        report = measure(options.model, tuple(options.threads or (2, 1)), options.rounds)
    except PeerError as error:
        print(f"peer_llama: {error}", file=sys.stderr)
        return EXIT_REFUSED
    if options.json:
        print(json.dumps(report))
    else:
        print_table(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
