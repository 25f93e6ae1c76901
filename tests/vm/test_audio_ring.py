"""The ring of sound: bounded, read again after a rollback, and an error that says what it no longer has."""
from __future__ import annotations

import threading

import numpy as np
import pytest

from m3jit.errors import BeyondReach, StreamError, Trap, UserError
from m3jit.vm.audio_ring import AudioRing
from m3jit.vm.waiting import Signal
from tests.vm.programs import machine

FRAME = 1920                       # 80 ms at 24 kHz


def sound(first: int, count: int) -> np.ndarray:
    """Frames whose value is their number, exact in f32."""
    return np.arange(first, first + count, dtype=np.float32)


def test_the_newest_two_seconds_are_kept():
    ring = AudioRing(Signal())
    for i in range(40):
        ring.push(sound(i * FRAME, FRAME))
    assert (ring.frames, ring.end, ring.base) == (48_000, 40 * FRAME, 40 * FRAME - 48_000)
    found, position = ring.read(ring.base, 0, False)
    assert found[:, 0].tolist() == sound(ring.base, 48_000).tolist() and position == ring.end
    ring.push(sound(0, 100_000))                       # more than it holds at once
    assert ring.read(ring.base, 3, False)[0][:, 0].tolist() == [52_000, 52_001, 52_002]


def test_reads_of_any_size_give_the_sound_in_order():
    rng, ring, taken = np.random.default_rng(3), AudioRing(Signal(), seconds=0.01), []
    pushed = at = 0
    for _ in range(300):
        n = int(rng.integers(1, 60))
        ring.push(sound(pushed, n))
        pushed += n
        while ring.end - at >= 50:
            found, at = ring.read(at, int(rng.integers(1, 51)), False)
            taken += found[:, 0].tolist()
    assert taken == sound(0, at).tolist()


def test_a_rollback_reads_the_window_again_and_the_device_goes_on():
    vm = machine("""
        FORK rS
        SENSE rA, AUDIO_PCM, AUDIO_PCM, COUNT=1920
        YIELD
        ABORT rS
        SENSE rB, AUDIO_PCM, AUDIO_PCM, COUNT=1920
        SENSE rC, AUDIO_PCM, AUDIO_PCM, COUNT=1920
        HALT
    """)
    ring = vm.audio_input()
    ring.push(sound(0, FRAME))
    vm.step(2)
    first = vm.get("rA").data.tolist()
    ring.push(sound(FRAME, FRAME))                     # the device does not go back
    vm.run()
    assert vm.get("rA") is None and vm.get("rB").data.tolist() == first == sound(0, FRAME).tolist()
    assert vm.get("rC").data.tolist() == sound(FRAME, FRAME).tolist()
    assert vm.main.cursors["AUDIO_PCM"] == 2 * FRAME == ring.end


def test_beyond_the_reach_of_the_ring_is_a_named_error():
    vm = machine("FORK rS\nSENSE rA, AUDIO_PCM, COUNT=10\nYIELD\nABORT rS\nSENSE rA, AUDIO_PCM, COUNT=10\nHALT")
    ring = vm.audio_input(seconds=0.01)                # 240 frames
    ring.push(sound(0, 240))
    vm.step(3)
    ring.push(sound(240, 100))
    with pytest.raises(Trap, match=r"audio ring AUDIO_PCM: frame 0 is beyond its reach, 240 frames \(0.01 s\); "
                                   r"the oldest it "
                                   r"has is 100.  Read sooner, go back less far, keep more seconds, or skip what is "
                                   r"gone \(VM.skip_input\)") as caught:
        vm.run()
    assert isinstance(caught.value.__cause__, BeyondReach)
    assert vm.main.cursors.get("AUDIO_PCM", 0) == 0    # the trap changed nothing


def test_a_first_read_begins_with_the_oldest_frame_there_is():
    vm = machine("FORK rS\nSENSE rA, AUDIO_PCM, AUDIO_PCM, COUNT=10\nFORK rC, child\nYIELD\nABORT rS\n"
                 "SENSE rB, AUDIO_PCM, AUDIO_PCM, COUNT=10\nHALT\nchild: SENSE rA, AUDIO_PCM, AUDIO_PCM, COUNT=5\nHALT")
    ring = vm.audio_input(seconds=0.01)                # 240 frames
    ring.push(sound(0, 300))
    vm.run()
    assert vm.get("rB").data.tolist() == sound(60, 10).tolist()        # and after the rollback the same ones
    assert vm.main.cursors == {"AUDIO_PCM": 70}


def test_a_first_read_that_waits_loses_nothing_by_it():
    vm = machine("SENSE rA, AUDIO_PCM, AUDIO_PCM, COUNT=10\nHALT")
    ring = vm.audio_input(seconds=0.01)
    ring.push(sound(0, 9))
    vm.interpreter.run_exactly(vm.main, 1)
    assert vm.main.status == "waiting"
    ring.push(sound(9, 500))
    assert vm.run().get("rA").data.tolist() == sound(269, 10).tolist()


def test_a_program_that_was_too_late_can_skip():
    vm = machine("top: SENSE rA, rGot, AUDIO_PCM, AUDIO_PCM, NON_BLOCKING, COUNT=10\nYIELD\nJUMP top")
    ring = vm.audio_input(seconds=0.01)
    ring.push(sound(0, 10))
    vm.step(2)
    ring.push(sound(10, 400))
    before = vm.fork()
    for place, keep, first in (("oldest", 0, 170), ("newest", 20, 390), ("newest", 1000, 170)):
        vm.skip_input("AUDIO_PCM", place, keep=keep)
        vm.step(3)
        assert vm.get("rA").data.tolist() == sound(first, 10).tolist()
    vm.skip_input("AUDIO_PCM")
    vm.step(3)
    assert vm.get("rGot") == 0 and vm.main.cursors["AUDIO_PCM"] == 410
    vm.abort(before)                                   # the position goes back too
    assert vm.main.cursors["AUDIO_PCM"] == 10
    with pytest.raises(Trap, match="frame 10 is beyond its reach"):
        vm.step(3)


def test_skipping_ends_a_wait_at_the_old_place():
    vm = machine("SENSE rA, AUDIO_PCM, AUDIO_PCM, COUNT=10\nSENSE rA, AUDIO_PCM, AUDIO_PCM, COUNT=10\nHALT")
    ring = vm.audio_input(seconds=0.01)
    ring.push(sound(0, 15))
    for _ in range(2):
        vm.interpreter.run_exactly(vm.main, 1)
    assert vm.main.status == "waiting"
    vm.skip_input("AUDIO_PCM", "oldest")
    assert vm.run().get("rA").data.tolist() == sound(0, 10).tolist()


def test_pushed_input_can_be_skipped():
    vm = machine("SENSE rA, USER_INPUT\nHALT")
    vm.push_input("a")
    vm.push_input("b")
    vm.skip_input("USER_INPUT", "newest", keep=1)
    assert vm.run().get("rA").tobytes() == b"b"


def test_what_cannot_be_skipped():
    vm = machine("HALT")
    vm.audio_input()
    vm.set_source("ROWS", np.zeros((2, 2)))
    for arguments, message in ((("AUDIO_PCM", "middle"), '"oldest" or "newest" is expected'),
                               (("AUDIO_PCM", "newest", -1), "a whole number from 0"),
                               (("CAMERA",), "CAMERA is no source of this machine; sound"),
                               (("ROWS",), "ROWS reads from ArraySource; sound")):
        with pytest.raises(UserError, match=message):
            vm.skip_input(*arguments)


def test_more_than_the_ring_holds_is_refused_at_once():
    vm = machine("SENSE rA, AUDIO_PCM, COUNT=241\nHALT")
    vm.audio_input(seconds=0.01).push(sound(0, 1000))
    with pytest.raises(Trap, match="COUNT=241 frames are asked for, and it keeps 240; read fewer at a time"):
        vm.run()


def test_waiting_for_sound():
    vm = machine("SENSE rA, AUDIO_PCM, COUNT=8\nSENSE rB, rOk, AUDIO_PCM, COUNT=8\nSENSE rC, rEnd, AUDIO_PCM\nHALT")
    ring = vm.audio_input(channels=2)
    thread = threading.Thread(target=vm.run)
    thread.start()
    ring.push(np.zeros((5, 2), np.int16))
    ring.push(np.full((7, 2), 16384, np.int16))
    ring.close()
    thread.join(180)
    assert not thread.is_alive()
    assert vm.get("rA").shape == (8, 2) and vm.get("rA").data[5].tolist() == [0.5, 0.5]
    assert vm.get("rB").shape == (4, 2) and (vm.get("rOk"), vm.get("rEnd")) == (1, -1)


def test_nothing_yet():
    vm = machine("SENSE rA, rGot, AUDIO_PCM, NON_BLOCKING, COUNT=8\nHALT")
    vm.audio_input().push(np.zeros(7))
    assert vm.run().get("rGot") == 0


@pytest.mark.parametrize("samples", [np.zeros((3, 2)), np.zeros(3, np.complex64), np.zeros((1, 1, 1)), np.zeros(())])
def test_samples_of_another_kind_are_refused(samples):
    ring = AudioRing(Signal())
    with pytest.raises(StreamError, match=r"audio ring AUDIO_PCM: takes samples \[n, 1\], got"):
        ring.push(samples)
    assert ring.end == 0


def test_a_closed_ring_takes_no_more():
    ring = AudioRing(Signal())
    ring.close()
    with pytest.raises(StreamError, match="is closed"):
        ring.push(np.zeros(1))


@pytest.mark.parametrize("options", [{"rate": 0}, {"seconds": 0}, {"seconds": -1}, {"channels": 0}, {"seconds": 1e9},
                                     {"rate": 24_000, "seconds": float("nan")}])
def test_sizes_are_checked(options):
    with pytest.raises(UserError, match="it holds 1 frame to"):
        AudioRing(Signal(), **options)
