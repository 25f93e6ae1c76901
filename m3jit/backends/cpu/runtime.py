"""Native support code, written in LLVM IR: barrier, agreement, worker loop and launch.

Memory shared by the threads of one pool (byte offsets; every group on its own 128-byte line pair):

      0  barrier: arrivals (i32)
    128  barrier: generation (i32)
    256  agreement: two i32 slots, used in turn
    384  busy (i32): a launch is running
    392  job: sequence number (i32); 400 function; 408 frame; 416 threads (i64)
    512 + 128 t   worker t: +0 go (i32, sequence number of its newest job), +4 sleeping (i32), +8 ready (i32)
                  +64 done (i32)

`launch(call)` takes one pointer to {pool, function, frame, threads} and returns the frame's EXIT word.  It runs
`function(thread, threads, frame, pool)` on this thread (as thread 0) and on workers 1 .. threads-1.  If another launch
is running in the pool, this one runs alone on the calling thread: the bytes are the same.

Waiting: a few pause instructions, then sched_yield (a busy neighbour must not cost a time slice), and for workers with
nothing to do a futex sleep.
"""
from __future__ import annotations

import ctypes
import platform
import sys

from m3jit.backends.cpu.target import CpuTarget
from m3jit.ir.plan import FrameWord

BUSY = 384
POOL_HEADER = 512
WORKER_BYTES = 128

_BARRIER_SPINS = 256       # pauses before yielding: about 10 microseconds
_IDLE_SPINS = 1000         # an idle worker: about 30 microseconds of pauses,
_IDLE_YIELDS = 400         # then some 0.2 ms of yielding, then sleep


def imports() -> dict[str, int]:
    """Addresses of the C library functions that generated code calls."""
    lib = ctypes.CDLL(None)
    names = ["sched_yield", "memcpy", "memset", "syscall" if sys.platform == "linux" else "usleep"]
    found = {n: ctypes.cast(getattr(lib, n), ctypes.c_void_p).value for n in names}
    try:
        found["fma"] = ctypes.cast(lib.fma, ctypes.c_void_p).value
    except AttributeError:
        found["fma"] = ctypes.cast(ctypes.CDLL("libm.so.6").fma, ctypes.c_void_p).value
    return found


def _sleep_text() -> str:
    """wait_on(word, seen): sleep while *word == seen (may wake early); wake(word)."""
    if sys.platform != "linux":
        return """
declare i32 @usleep(i32)
define internal void @wait_on(ptr %word, i32 %seen) nounwind noinline {
  %r = call i32 @usleep(i32 50)
  ret void
}
define internal void @wake(ptr %word) nounwind noinline {
  ret void
}
"""
    number = {"x86_64": 202, "aarch64": 98}[platform.machine()]
    return f"""
declare i64 @syscall(i64, ...)
define internal void @wait_on(ptr %word, i32 %seen) nounwind noinline {{
  %r = call i64 (i64, ...) @syscall(i64 {number}, ptr %word, i64 128, i32 %seen, ptr null, ptr null, i64 0)
  ret void
}}
define internal void @wake(ptr %word) nounwind noinline {{
  %r = call i64 (i64, ...) @syscall(i64 {number}, ptr %word, i64 129, i64 1, ptr null, ptr null, i64 0)
  ret void
}}
"""


def runtime_text(target: CpuTarget) -> str:
    """IR of the support functions: m3_barrier, m3_agree, m3_worker, m3_launch, m3_stop."""
    if target.arch == "x86_64":
        declare, pause = "declare void @llvm.x86.sse2.pause()\n", "call void @llvm.x86.sse2.pause()"
    else:
        declare, pause = "declare void @llvm.aarch64.hint(i32)\n", "call void @llvm.aarch64.hint(i32 1)"
    return declare + "declare i32 @sched_yield()\n" + _sleep_text() + _BARRIER.replace("PAUSE", pause).replace(
        "SPINS", str(_BARRIER_SPINS)) + _WORKER.replace("PAUSE", pause).replace(
        "SPINS", str(_IDLE_SPINS)).replace("YIELDS", str(_IDLE_YIELDS)) + _LAUNCH.replace("PAUSE", pause).replace(
        "EXITBYTE", str(8 * FrameWord.EXIT)).replace("SPINS", str(_BARRIER_SPINS))


_BARRIER = """
define void @m3_barrier(ptr %sync, i64 %nth) nounwind {
entry:
  %generation = getelementptr i8, ptr %sync, i64 128
  %mine = load atomic i32, ptr %generation acquire, align 4
  %before = atomicrmw add ptr %sync, i32 1 acq_rel
  %arrived = add i32 %before, 1
  %all = trunc i64 %nth to i32
  %last = icmp eq i32 %arrived, %all
  br i1 %last, label %open, label %spin
open:
  store atomic i32 0, ptr %sync monotonic, align 4
  %next = add i32 %mine, 1
  store atomic i32 %next, ptr %generation release, align 4
  ret void
spin:
  %i = phi i32 [ 0, %entry ], [ %more, %again ]
  %now = load atomic i32, ptr %generation acquire, align 4
  %changed = icmp ne i32 %now, %mine
  br i1 %changed, label %leave, label %waiting
waiting:
  %patient = icmp ult i32 %i, SPINS
  br i1 %patient, label %short, label %long
short:
  PAUSE
  br label %again
long:
  %r = call i32 @sched_yield()
  br label %again
again:
  %inc = add i32 %i, 1
  %more = select i1 %patient, i32 %inc, i32 %i
  br label %spin
leave:
  ret void
}

; thread 0 reads the stop word and all threads return what it read
define i32 @m3_agree(i64 %tid, i64 %nth, ptr %sync, ptr %stop) nounwind {
entry:
  %generation = getelementptr i8, ptr %sync, i64 128
  %mine = load atomic i32, ptr %generation acquire, align 4
  %parity = and i32 %mine, 1
  %parity64 = zext i32 %parity to i64
  %slots = getelementptr i8, ptr %sync, i64 256
  %slot = getelementptr i32, ptr %slots, i64 %parity64
  %reads = icmp eq i64 %tid, 0
  br i1 %reads, label %read, label %meet
read:
  %word = load atomic i32, ptr %stop monotonic, align 4
  store atomic i32 %word, ptr %slot monotonic, align 4
  br label %meet
meet:
  call void @m3_barrier(ptr %sync, i64 %nth)
  %agreed = load atomic i32, ptr %slot monotonic, align 4
  ret i32 %agreed
}
"""

_WORKER = """
define void @m3_worker(ptr %pool, i64 %tid) nounwind {
entry:
  %scaled = mul i64 %tid, 128
  %offset = add i64 %scaled, 512
  %go = getelementptr i8, ptr %pool, i64 %offset
  %sleeping = getelementptr i8, ptr %go, i64 4
  %ready = getelementptr i8, ptr %go, i64 8
  %done = getelementptr i8, ptr %go, i64 64
  %fnp = getelementptr i8, ptr %pool, i64 400
  %framep = getelementptr i8, ptr %pool, i64 408
  %nthp = getelementptr i8, ptr %pool, i64 416
  store atomic i32 1, ptr %ready release, align 4
  br label %idle
idle:
  %seen = phi i32 [ 0, %entry ], [ %now, %run ]
  br label %look
look:
  %i = phi i32 [ 0, %idle ], [ %more, %again ]
  %now = load atomic i32, ptr %go acquire, align 4
  %called = icmp ne i32 %now, %seen
  br i1 %called, label %work, label %wait
wait:
  %more = add i32 %i, 1
  %patient = icmp ult i32 %i, SPINS
  br i1 %patient, label %short, label %longer
short:
  PAUSE
  br label %again
longer:
  %yielded = sub i32 %i, SPINS
  %yielding = icmp ult i32 %yielded, YIELDS
  br i1 %yielding, label %yield, label %sleep
yield:
  %r = call i32 @sched_yield()
  br label %again
sleep:
  store atomic i32 1, ptr %sleeping seq_cst, align 4
  %last = load atomic i32, ptr %go seq_cst, align 4
  %still = icmp eq i32 %last, %seen
  br i1 %still, label %down, label %up
down:
  call void @wait_on(ptr %go, i32 %seen)
  br label %up
up:
  store atomic i32 0, ptr %sleeping seq_cst, align 4
  br label %again
again:
  br label %look
work:
  %fn = load ptr, ptr %fnp, align 8
  %none = icmp eq ptr %fn, null
  br i1 %none, label %leave, label %run
run:
  %frame = load ptr, ptr %framep, align 8
  %nth = load i64, ptr %nthp, align 8
  call void %fn(i64 %tid, i64 %nth, ptr %frame, ptr %pool)
  store atomic i32 %now, ptr %done release, align 4
  br label %idle
leave:
  store atomic i32 0, ptr %ready release, align 4
  ret void
}
"""

_LAUNCH = """
; hands the job to workers 1 .. nth-1 and returns its sequence number
define internal i32 @hand_out(ptr %pool, ptr %fn, ptr %frame, i64 %nth) nounwind noinline {
entry:
  %seqp = getelementptr i8, ptr %pool, i64 392
  %fnp = getelementptr i8, ptr %pool, i64 400
  %framep = getelementptr i8, ptr %pool, i64 408
  %nthp = getelementptr i8, ptr %pool, i64 416
  %old = load i32, ptr %seqp, align 4
  %seq = add i32 %old, 1
  store i32 %seq, ptr %seqp, align 4
  store ptr %fn, ptr %fnp, align 8
  store ptr %frame, ptr %framep, align 8
  store i64 %nth, ptr %nthp, align 8
  br label %each
each:
  %t = phi i64 [ 1, %entry ], [ %t1, %handed ]
  %more = icmp slt i64 %t, %nth
  br i1 %more, label %one, label %leave
one:
  %scaled = mul i64 %t, 128
  %offset = add i64 %scaled, 512
  %go = getelementptr i8, ptr %pool, i64 %offset
  store atomic i32 %seq, ptr %go seq_cst, align 4
  %sleepingp = getelementptr i8, ptr %go, i64 4
  %sleeping = load atomic i32, ptr %sleepingp seq_cst, align 4
  %asleep = icmp ne i32 %sleeping, 0
  br i1 %asleep, label %rouse, label %handed
rouse:
  call void @wake(ptr %go)
  br label %handed
handed:
  %t1 = add i64 %t, 1
  br label %each
leave:
  ret i32 %seq
}

define i64 @m3_launch(ptr %call) nounwind {
entry:
  %pool = load ptr, ptr %call, align 8
  %fnp = getelementptr i8, ptr %call, i64 8
  %fn = load ptr, ptr %fnp, align 8
  %framep = getelementptr i8, ptr %call, i64 16
  %frame = load ptr, ptr %framep, align 8
  %nthp = getelementptr i8, ptr %call, i64 24
  %nth = load i64, ptr %nthp, align 8
  %single = icmp sle i64 %nth, 1
  br i1 %single, label %alone, label %acquire
acquire:
  %busyp = getelementptr i8, ptr %pool, i64 384
  %pair = cmpxchg ptr %busyp, i32 0, i32 1 acquire monotonic
  %got = extractvalue { i32, i1 } %pair, 1
  br i1 %got, label %together, label %alone
alone:
  call void %fn(i64 0, i64 1, ptr %frame, ptr %pool)
  br label %leave
together:
  %seq = call i32 @hand_out(ptr %pool, ptr %fn, ptr %frame, i64 %nth)
  call void %fn(i64 0, i64 %nth, ptr %frame, ptr %pool)
  br label %each
each:
  %t = phi i64 [ 1, %together ], [ %t1, %finished ]
  %more = icmp slt i64 %t, %nth
  br i1 %more, label %one, label %release
one:
  %scaled = mul i64 %t, 128
  %offset = add i64 %scaled, 576
  %done = getelementptr i8, ptr %pool, i64 %offset
  br label %look
look:
  %i = phi i32 [ 0, %one ], [ %i1, %again ]
  %state = load atomic i32, ptr %done acquire, align 4
  %ok = icmp eq i32 %state, %seq
  br i1 %ok, label %finished, label %wait
wait:
  %patient = icmp ult i32 %i, SPINS
  br i1 %patient, label %short, label %long
short:
  PAUSE
  br label %again
long:
  %r = call i32 @sched_yield()
  br label %again
again:
  %inc = add i32 %i, 1
  %i1 = select i1 %patient, i32 %inc, i32 %i
  br label %look
finished:
  %t1 = add i64 %t, 1
  br label %each
release:
  store atomic i32 0, ptr %busyp release, align 4
  br label %leave
leave:
  %exitp = getelementptr i8, ptr %frame, i64 EXITBYTE
  %exit = load i64, ptr %exitp, align 8
  ret i64 %exit
}

; waits until no launch runs, then tells workers 1 .. nth-1 to return; the pool stays busy for good
define void @m3_stop(ptr %pool, i64 %nth) nounwind {
entry:
  %busyp = getelementptr i8, ptr %pool, i64 384
  br label %acquire
acquire:
  %pair = cmpxchg ptr %busyp, i32 0, i32 1 acquire monotonic
  %got = extractvalue { i32, i1 } %pair, 1
  br i1 %got, label %tell, label %later
later:
  %r = call i32 @sched_yield()
  br label %acquire
tell:
  %seq = call i32 @hand_out(ptr %pool, ptr null, ptr null, i64 %nth)
  ret void
}
"""
