"""The file of a log: what is written is read, whatever is cut or flipped is said, and nothing makes the reader do more
than the file is long."""
from __future__ import annotations

import contextlib
import errno
import math
import os
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from m3jit.durable.files import Files, lock_holder
from m3jit.errors import UserError
from m3jit.isa.types import BF16, F16, Q8_0, Tensor
from m3jit.timetravel import log_file
from m3jit.timetravel.log_file import END, EVENTS, FORMAT, HEAD, MAGIC, LogError, LogFailed, LogReader, LogWriter
from m3jit.timetravel.wire import Reader, WireError, put
from m3jit.vm.recording import Event, Output, Raised
from m3jit.vm.sources import END as AT_END
from m3jit.vm.sources import NOTHING
from tests.durable.holders import held_by

EXAMPLES = [Event(1, 4, "clock", 123456789012), Event(1, 9, "sense", ("text", 1)), Event(2, 0, "sense", (AT_END, 3)),
            Event(1, 9, "output", Output("OUTPUT", "TEXT", 3, 2 ** 63 + 5, b"abc")), Event(2, 0, "block", "input"),
            Event(2, 0, "wake", (15, 1, 4)), Event(1, 8, "another kind", None),
            Event(1, 9, "failed", Raised("StreamError", "x")),
            Event(1, 2 ** 40, "sense", (np.arange(6, dtype=np.int16).reshape(2, 3), 7)), Event(1, 2, "time", -1),
            Event(1, 3, "digest", "00ff"), Event(1, 4, "interrupt", True)]


@pytest.fixture(autouse=True)
def _one_record_of_events(monkeypatch):
    """However slow the machine is."""
    monkeypatch.setattr(log_file, "PERIOD", 1000)


@pytest.fixture(scope="module")
def log_bytes(tmp_path_factory) -> bytes:
    """A whole log."""
    before, log_file.PERIOD = log_file.PERIOD, 1000
    data = written(tmp_path_factory.mktemp("log") / "log").read_bytes()
    log_file.PERIOD = before
    return data


def written(path, events=EXAMPLES, head=None, end=True):
    writer = LogWriter(str(path), head or {"name": "x", "registers": {"R1": 1.5}})
    for e in events:
        writer.append(e)
    if end:
        writer.close({"status": "done"})
    return path


def same(a, b) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    return type(a) is type(b) and a == b or a is b


def test_what_is_written_is_read(tmp_path):
    reader = LogReader(str(written(tmp_path / "log")))
    assert reader.head == {"name": "x", "registers": {"R1": 1.5}}
    assert all(map(same, list(reader.events()), EXAMPLES)) and reader.end == {"status": "done"} and not reader.torn


def test_events_reach_the_disk_without_waiting_for_more(tmp_path, monkeypatch):
    """A killed recording is readable: here the writer is simply never closed."""
    monkeypatch.setattr(log_file, "PERIOD", 0.01)
    import time
    writer = LogWriter(str(tmp_path / "log"), {"name": "x"})
    writer.append(EXAMPLES[0])
    for _ in range(600):                               # it is written within a tenth of a second
        reader = LogReader(str(tmp_path / "log"))
        if list(reader.events()) == EXAMPLES[:1]:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the event never came")
    assert reader.torn and reader.end is None
    writer.close({})


@pytest.mark.parametrize("number, lost", [(errno.EIO, True), (errno.EINVAL, False)])
def test_a_disk_that_does_not_keep_the_end_is_said(tmp_path, monkeypatch, number, lost):
    """EINVAL: a pipe or a device, which has nothing to sync."""
    writer = LogWriter(str(tmp_path / "log"), {"name": "x"})

    def failing(descriptor):
        raise OSError(number, os.strerror(number))
    with monkeypatch.context() as patched:
        patched.setattr(log_file.os, "fsync", failing)
        with pytest.raises(LogFailed, match="Input/output error") if lost else contextlib.nullcontext():
            writer.close({})


def test_a_process_that_ends_without_closing_its_log_loses_nothing(tmp_path):
    """A child of it, which has the same file, writes nothing there."""
    code = ("import os, sys\nfrom m3jit.timetravel import log_file\nfrom m3jit.vm.recording import Event\n"
            "log_file.PERIOD = 1000\nwriter = log_file.LogWriter(sys.argv[1], {})\n"
            "for n in range(3):\n    writer.append(Event(1, n, 'clock', n))\n"
            "child = os.fork()\nif child:\n    assert os.waitpid(child, 0)[1] == 0\n")
    subprocess.run([sys.executable, "-c", code, tmp_path / "log"], check=True, timeout=300)
    reader = LogReader(str(tmp_path / "log"))
    assert [event.value for event in reader.events()] == [0, 1, 2] and reader.torn


def test_a_log_belongs_to_one_writer(tmp_path):
    """And stays what it is when it is written: a log is a new file."""
    log = str(tmp_path / "log")
    open(log, "wb").close()                            # as mktemp makes it
    writer = LogWriter(log, {"name": "x"})
    with pytest.raises(UserError, match=f"log: is in use by {held_by(os.getpid(), tmp_path)}, which records into "
                                        "it; give this log another name"):
        LogWriter(log, {"name": "y"})
    writer.append(EXAMPLES[0])
    writer.close({})
    before = (tmp_path / "log").read_bytes()
    (tmp_path / "text").write_text("mine")
    for path in (log, str(tmp_path / "text")):
        with pytest.raises(UserError, match="is there already, and a log is not written over another file; give the "
                                            "log another name, or remove the file first"):
            LogWriter(path, {"name": "y"})
    assert (tmp_path / "log").read_bytes() == before and (tmp_path / "text").read_text() == "mine"
    os.unlink(log)
    LogWriter(log, {"name": "y"}).close({})
    assert LogReader(log).head == {"name": "y"}


def test_devices_and_pipes_belong_to_nobody(tmp_path):
    first, second = LogWriter(os.devnull, {}), LogWriter(os.devnull, {})
    first.close({})
    second.close({})
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        LogWriter(str(tmp_path / "pipe"), {}).close({})
        assert os.read(reader, 1 << 16).startswith(MAGIC)
    finally:
        os.close(reader)


def test_a_system_without_locks_writes_no_log_over_another(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    written(tmp_path / "log")
    with pytest.raises(UserError, match="log: cannot be written: File exists; write the log to another place"):
        LogWriter(str(tmp_path / "log"), {"name": "x"})
    assert LogReader(str(tmp_path / "log")).head["name"] == "x"


@pytest.mark.parametrize("there", [False, True])
def test_a_log_that_could_not_begin_is_no_log_in_the_way(tmp_path, monkeypatch, there):
    """It is removed; an empty file that was there, and is somebody's, stays empty."""
    if there:
        (tmp_path / "log").touch()
    with monkeypatch.context() as patched:
        patched.setattr(log_file.LogWriter, "_record", lambda self, *_: setattr(self, "_error", OSError(28, "full")))
        with pytest.raises(LogFailed, match="log: cannot be written: full; nothing was recorded"):
            LogWriter(str(tmp_path / "log"), {})
    assert [(p.name, p.stat().st_size) for p in tmp_path.iterdir()] == [("log", 0)] * there
    written(tmp_path / "log")


def test_who_holds_a_lock(tmp_path, monkeypatch):
    held = Files().lock(tmp_path / "lock", shared=False)
    assert lock_holder(tmp_path / "lock") == held_by(os.getpid(), tmp_path)
    (tmp_path / "free").write_text("")
    assert lock_holder(tmp_path / "free") == lock_holder(tmp_path / "none") == "another process"
    with monkeypatch.context() as patched:             # as on a subvolume, whose files say another device
        patched.setattr("m3jit.durable.files.os.major", lambda device: 4095)
        assert lock_holder(tmp_path / "lock") == "another process"
    held.close()
    assert lock_holder(tmp_path / "lock") == "another process"


def test_ctrl_c_in_the_middle_of_an_event_leaves_a_whole_log(tmp_path, monkeypatch):
    writer = LogWriter(str(tmp_path / "log"), {"name": "x"})
    writer.append(EXAMPLES[0])

    def interrupted(out, value):
        out.append(5)
        raise KeyboardInterrupt
    with monkeypatch.context() as patched:
        patched.setattr(log_file, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.append(EXAMPLES[1])
    writer.close({"status": "KeyboardInterrupt"})
    reader = LogReader(str(tmp_path / "log"))
    assert list(reader.events()) == EXAMPLES[:1] and reader.end == {"status": "KeyboardInterrupt"}


def test_every_cut_is_readable_up_to_the_last_whole_record(tmp_path):
    data = written(tmp_path / "log").read_bytes()
    records = _records(data)
    for cut in range(len(data)):
        (tmp_path / "cut").write_bytes(data[:cut])
        try:
            reader = LogReader(str(tmp_path / "cut"))
        except LogError as e:
            assert cut < records[1][0] and ("no log" in str(e) or "killed as it began" in str(e))
            continue
        found = list(reader.events())
        assert reader.torn and len(found) in (0, len(EXAMPLES)) and (len(found) > 0) == (cut >= records[2][0])


def _records(data: bytes) -> list[tuple[int, int]]:
    """(start, kind) of every record."""
    out, at = [], len(MAGIC) + 4
    while at < len(data):
        kind, _, _, length, _ = struct.unpack_from("<BBHII", data, at)
        out.append((at, kind))
        at += 12 + length
    assert [k for _, k in out] == [HEAD, EVENTS, END]
    return out


def test_every_flipped_bit_is_noticed(tmp_path):
    data = bytearray(written(tmp_path / "log").read_bytes())
    for place in range(len(data)):
        if data[place + 0:place + 1] and any(start + 1 == place for start, _ in _records(bytes(data))):
            continue                                   # the byte that is always 0 says nothing
        data[place] ^= 1 << place % 8
        (tmp_path / "bad").write_bytes(data)
        with pytest.raises(LogError):
            list(LogReader(str(tmp_path / "bad")).events())
        data[place] ^= 1 << place % 8


def test_damage_is_said_with_its_place(tmp_path):
    data = bytearray(written(tmp_path / "log").read_bytes())
    data[_records(bytes(data))[1][0] + 20] ^= 16
    (tmp_path / "log").write_bytes(data)
    with pytest.raises(LogError, match=r"record 1 \(byte \d+\) is damaged; the file was changed after it was written"):
        list(LogReader(str(tmp_path / "log")).events())


@pytest.mark.parametrize("content, message", [
    (b"", "is no log of a run; `m3jit record` makes one"), (b"GGUF" + bytes(60), "is no log of a run"),
    (MAGIC[:5], "ends in its first 5 bytes"), (MAGIC + struct.pack("<I", FORMAT), "ends before it says what was run"),
    (MAGIC + struct.pack("<I", FORMAT + 1),
     f"is a log of format {FORMAT + 1}; this version of m3jit reads format {FORMAT}. Update"),
    (MAGIC + struct.pack("<I", 0), "Record the run again")])
def test_files_that_are_no_logs(tmp_path, content, message):
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(LogError, match=message):
        LogReader(str(tmp_path / "log"))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(LogError, match="No such file"):
        LogReader(str(tmp_path / "gone"))
    with pytest.raises(UserError, match="cannot be written: there is no folder"):
        LogWriter(str(tmp_path / "gone" / "log"), {})


def test_a_full_disk_ends_the_run():
    with pytest.raises(LogFailed, match="No space left on device; nothing was recorded"):
        LogWriter("/dev/full", {"name": "x"})


def test_a_disk_that_fills_up_stops_the_run(tmp_path, monkeypatch):
    """What was written before is a log that can be replayed, and the error says so."""
    monkeypatch.setattr(log_file, "CHUNK", 1)          # every event is a record
    writer = LogWriter(str(tmp_path / "log"), {"name": "x"})
    writer.append(EXAMPLES[0])
    says = (r"log: cannot be written: No space left on device; the run was stopped\. What was recorded before can be "
            r"replayed; make room there, or write the log to another place$")
    with writer._file, open("/dev/full", "wb", buffering=0) as full:
        writer._file = full
        with pytest.raises(LogFailed, match=says):
            writer.append(EXAMPLES[1])
        with pytest.raises(LogFailed, match=says):
            writer.close({"status": "LogFailed"})
    reader = LogReader(str(tmp_path / "log"))
    assert list(reader.events()) == EXAMPLES[:1] and reader.torn


def test_bytes_behind_the_end(tmp_path):
    path = written(tmp_path / "log")
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(LogError, match="goes on behind its end"):
        list(LogReader(str(path)).events())


# -- values ------------------------------------------------------------------------------------------------------------

plain = st.one_of(st.none(), st.booleans(), st.integers(-2 ** 63, 2 ** 64 - 1), st.floats(), st.text(max_size=20),
                  st.binary(max_size=20), st.sampled_from([AT_END, NOTHING, Raised("StreamError", "because")]))
arrays = st.builds(lambda shape, name: np.arange(math.prod(shape)).astype(name).reshape(shape),
                   st.lists(st.integers(0, 3), max_size=4).map(tuple),
                   st.sampled_from(["bool", "int8", "uint8", "uint16", "int64", "float16", "float32", "float64"]))
tensors = st.one_of(arrays.filter(lambda a: a.dtype.name in ("bool", "int8", "uint8", "int64", "float16",
                                                             "float32")).map(Tensor.of),
                    st.just(Tensor(BF16, (3,), np.array([1, 2, 0x7FC0], np.uint16))),
                    st.just(Tensor.of(np.ones((2, 2), np.float32), F16)),
                    st.just(Tensor.blocks(Q8_0, (2, 32), np.arange(68, dtype=np.uint8))))
values = st.recursive(st.one_of(plain, arrays, tensors), lambda inner: st.one_of(
    st.lists(inner, max_size=4).map(tuple), st.dictionaries(st.text(max_size=5), inner, max_size=3)), max_leaves=8)


@settings(max_examples=100, deadline=None)
@given(values)
def test_values_come_back(value):
    out = bytearray()
    put(out, value)
    reader = Reader(bytes(out))
    assert same(reader.value(), value) and reader.left == 0


@pytest.mark.parametrize("value", [object(), 2 ** 64, -2 ** 63 - 1, 1j, np.array(["a"]), {1: 2}])
def test_values_that_no_log_holds(value):
    with pytest.raises((WireError, AttributeError)):
        put(bytearray(), value)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=60), st.data())
def test_any_bytes_are_a_value_or_an_error(data, draw):
    """Bytes of a value, some of them changed, or any bytes at all; the kinds of outcome are printed (-s
    --hypothesis-show-statistics)."""
    if draw.draw(st.booleans()):
        out = bytearray()
        put(out, draw.draw(values))
        for _ in range(draw.draw(st.integers(0, 3))):
            if out:
                out[draw.draw(st.integers(0, len(out) - 1))] = draw.draw(st.integers(0, 255))
        data = bytes(out)
    try:
        Reader(data).value()
        event("a value")
    except WireError as e:
        event(str(e).translate(str.maketrans("", "", "0123456789"))[:40])


@settings(max_examples=150, deadline=None,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 10 ** 6), st.integers(0, 255)), min_size=1, max_size=4), st.booleans())
def test_changed_files_with_right_checksums_are_read_or_refused(tmp_path, log_bytes, changes, event_part):
    """The reader behind the checksums: payloads are changed and sealed again."""
    data = bytearray(log_bytes)
    start, _ = _records(bytes(data))[1 if event_part else 0]
    length = struct.unpack_from("<I", data, start + 4)[0]
    for place, byte in changes:
        data[start + 12 + place % length] = byte
    struct.pack_into("<I", data, start + 8, xxhash.xxh32_intdigest(bytes(data[start + 12:start + 12 + length])))
    (tmp_path / "changed").write_bytes(data)
    try:
        reader = LogReader(str(tmp_path / "changed"))
        event(f"{len(list(reader.events()))} events read")
    except LogError as e:
        event(str(e).partition(") ")[2].translate(str.maketrans("", "", "0123456789"))[:40])


def test_announced_sizes_allocate_nothing():
    """A few bytes that promise terabytes."""
    huge = b"\xff" * 8 + b"\x7f"
    tracemalloc.start()
    for data in (b"\x05" + huge, b"\x06" + huge, b"\x07" + huge, b"\x08" + huge, b"\x09\x07\x03" + huge * 3 + huge,
                 b"\x0a\x00\x02" + huge * 2 + b"\x00", bytes([7, 1]) * 40, b"\x09\x07" + huge, b"\x0e" + huge):
        with pytest.raises(WireError):
            Reader(data).value()
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_program_that_unpacks_to_more_than_it_says(tmp_path):
    import zlib
    from m3jit.timetravel.replay import program_of
    head = {"m3jit": "0", "name": "x", "hash": "0", "size": 100, "packed": zlib.compress(bytes(10 ** 7)),
            "program": b"",
            "models": {}, "seed": 0, "wait_input": False, "memory_limit": 1, "ring_capacity": 1, "snapshot_window": 1,
            "limits": {}, "registers": {}}
    tracemalloc.start()
    with pytest.raises(LogError, match="not the one its hash names"):
        program_of(head, "log")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    with pytest.raises(LogError, match="bytes, .* at most are kept compressed"):
        program_of(head | {"size": 10 ** 12}, "log")
    with pytest.raises(LogError, match="cannot be unpacked"):
        program_of(head | {"packed": b"abc"}, "log")
    with pytest.raises(LogError, match="does not say its 'seed'"):
        program_of(head | {"seed": "1"}, "log")
    with pytest.raises(LogError, match="its 'files' is no number"):
        program_of(head | {"limits": {"files": "/"}}, "log")


def test_the_fuzz_reaches_the_reader():
    """Lines of the reader that a fixed set of changed payloads executes; printed with -s."""
    import inspect
    import random
    rng = random.Random(1)
    code = {f.__code__: set() for f in vars(Reader).values() if inspect.isfunction(f)}

    def trace(frame, what, _):
        if frame.f_code not in code:
            return None
        if what == "line":
            code[frame.f_code].add(frame.f_lineno)
        return trace
    samples = [e.value for e in EXAMPLES] + [{"a": (1.5, None, True, False)}, Tensor.of(np.ones(3, np.float32)),
                                             Tensor.blocks(Q8_0, (1, 32), np.zeros(34, np.uint8)), np.ones(2, bool),
                                             Tensor.of(np.array([True]))]
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for n in range(3000):
            out = bytearray()
            put(out, samples[n % len(samples)])
            for _ in range(n % 4):
                out[rng.randrange(len(out))] = rng.choice((0, 1, 9, 10, 127, 255, rng.randrange(256)))
            try:
                Reader(bytes(out)).value()
            except WireError:
                pass
    finally:
        sys.settrace(before)
    every = {c: {line for _, _, line in c.co_lines() if line and line > c.co_firstlineno} for c in code}
    missed = sorted(line for c, lines in every.items() for line in lines - code[c])
    total = sum(map(len, every.values()))
    print(f"wire.Reader: {total - len(missed)} of {total} lines executed; not {missed}")
    assert len(missed) <= 0.05 * total


def test_a_value_that_a_log_cannot_hold_is_named(tmp_path):
    from m3jit.timetravel.wire import WireError
    with pytest.raises(WireError, match="talk: conversation: system: a value of class object cannot be recorded"):
        LogWriter(str(tmp_path / "log"), {"talk": {"conversation": {"system": object()}}})
    writer = LogWriter(str(tmp_path / "log"), {"m3jit": "0"})
    with pytest.raises(WireError, match="sense of context 3 after 7 instructions: item 0: a value of class set cannot"):
        writer.append(Event(3, 7, "sense", ({5}, 1)))
    writer.append(Event(3, 7, "clock", 1))
    writer.close({"status": "done"})
    assert [event.value for event in LogReader(str(tmp_path / "log")).events()] == [1]
