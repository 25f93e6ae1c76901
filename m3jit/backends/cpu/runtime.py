"""Native support code, written in LLVM IR: batches of launches, chunk claiming, worker loop, entry from the host.

A region runs on the calling thread alone.  Its parallel launches come in batches of independent items; a batch is
published as one job, whose chunks any thread claims.  The caller claims too, and at the end waits only for chunks that
are being executed: a worker that the kernel does not schedule costs nothing, unless it holds a chunk.

Memory of a pool (byte offsets; what different threads write lies on different 128-byte line pairs):

      0  done (i64): chunks of the present job that workers have finished
    128  job (i64): its number; 136 threads that may take part (i64); 144 stopping (i32)
    256  busy (i32): a region is running
    512 + 4 t   worker t sleeps (i32, the word it sleeps on)
   1536 + 4 t   worker t has started (i32)
   2560 + 128 t share of thread t: +0 ticket (i64): job number << 32 | first chunk that nobody has claimed, counted
                from the share's first << 16 | number of those; +8 the share's first chunk (i64), +16 items (ptr),
                +24 halt (ptr)

A job's chunks are dealt out in contiguous shares, one per thread, and whoever has finished its own share takes from
the end of the others'.  So threads that all run do not contend for one word, find their data in their own cache and
what they asked of memory ahead, and the share of a thread that does not run is computed by the rest.

Claiming: read the ticket, read the rest of the share, swap the ticket for one with a chunk less.  A share is not
replaced before all chunks of the job were claimed and done, so a successful swap proves that what was read belongs
together; the job number keeps an old ticket from fitting a new job.

An item is four words: run (ptr), grid (ptr), args (ptr), chunks (i64, filled in here).  `grid(args)` gives the number
of groups, `run(chunk, chunks, args, halt)` executes the groups [G * chunk / chunks, G * (chunk + 1) / chunks).

`halt` belongs to whoever runs the region: {pointer to the stop word (i32), skipped (i32)}.  Whoever takes a chunk, and
a kernel between two of its longer pieces of work, looks at the stop word; when it is URGENT the work is left out and
`skipped` is set.  A region that finds it set after a job leaves at once: what its temporaries hold is not used.  The
flag is what counts, not the word, which somebody may have lowered since.

`launch(call)` takes one pointer to {pool, region, frame, threads} and returns the frame's EXIT word.  If another region
is running in the pool, this one runs alone on the calling thread: the bytes are the same.

Waiting: some pause instructions, then sched_yield (a busy neighbour must not cost a time slice), and for workers with
nothing to do a futex sleep, from which the next job wakes them.
"""
from __future__ import annotations

import ctypes
import platform
import sys

from m3jit.backends.cpu.runtime_batch import batch_text
from m3jit.backends.cpu.runtime_jobs import JOB, WORKER
from m3jit.backends.cpu.target import CpuTarget
from m3jit.ir.plan import FrameWord

BUSY = 256
READY = 1536
MAX_THREADS = 256
POOL_BYTES = 2560 + 128 * MAX_THREADS
CHUNKS_PER_THREAD = 4
URGENT = 2                 # a stop word from this on: leave between two chunks (m3jit.vm.stopping)

_DONE_SPINS = 256          # pauses before yielding while a worker finishes its chunk: about 10 microseconds
_IDLE_SPINS = 1000         # an idle worker: about 30 microseconds of pauses,
_IDLE_YIELDS = 2000        # then about 1 ms of yielding, then sleep: Python takes 0.1 to 0.25 ms between two tokens,
                           # and who wakes a sleeper works alone meanwhile (200 yields: 1 % slower for SmolLM2)


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


def look(word: str, counted: bool) -> str:
    """Right-hand side of the stop word's value; it is compared with URGENT.

    counted: for tests; each look adds two to the word, so that a word that starts at URGENT - 2 n stops after n looks,
    and is never what a loop head looks for before."""
    if counted:
        return f"atomicrmw add ptr {word}, i32 2 monotonic"
    return f"load atomic i32, ptr {word} monotonic, align 4"


def _halt_functions(counted: bool) -> str:
    return f"""
define internal i1 @halted(ptr %word) nounwind noinline {{
  %value = {look("%word", counted)}
  %urgent = icmp sge i32 %value, {URGENT}
  ret i1 %urgent
}}
define internal void @note_skipped(ptr %halt) nounwind noinline {{
  %skippedp = getelementptr i8, ptr %halt, i64 8
  store atomic i32 1, ptr %skippedp monotonic, align 4
  ret void
}}
"""


def runtime_text(target: CpuTarget, counted: bool = False) -> str:
    """IR of the support functions: m3_run, m3_copy, m3_copy_grid, m3_worker, m3_launch, m3_stop, and those of
    runtime_batch.  counted: see `look`."""
    if target.arch == "x86_64":
        declare, pause = "declare void @llvm.x86.sse2.pause()\n", "call void @llvm.x86.sse2.pause()"
    else:
        declare, pause = "declare void @llvm.aarch64.hint(i32)\n", "call void @llvm.aarch64.hint(i32 1)"
    text = "".join((_halt_functions(counted), _ITEMS, JOB, WORKER, _LAUNCH, batch_text()))
    for name, value in (("PAUSE", pause), ("DONE_SPINS", _DONE_SPINS), ("IDLE_SPINS", _IDLE_SPINS),
                        ("IDLE_LIMIT", _IDLE_SPINS + _IDLE_YIELDS), ("CHUNKS_PER_THREAD", CHUNKS_PER_THREAD),
                        ("EXIT_BYTE", 8 * FrameWord.EXIT)):
        text = text.replace(name, str(value))
    worker = guarded(target, "m3_worker", "ptr %pool, i64 %tid", "serve")
    return declare + "declare i32 @sched_yield()\n" + _sleep_text() + text + worker


def guarded(target: CpuTarget, name: str, params: str, body: str) -> str:
    """A function that calls `body` with the floating-point control word set (round to nearest, denormals kept) and
    puts the caller's word back.  `body` must not be inlined, so that nothing moves across."""
    if target.arch == "x86_64":
        return f"""declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
define void @{name}({params}) nounwind {{
  %saved = alloca i32
  %wanted = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %saved)
  store i32 8064, ptr %wanted
  call void @llvm.x86.sse.ldmxcsr(ptr %wanted)
  call void @{body}({params})
  call void @llvm.x86.sse.ldmxcsr(ptr %saved)
  ret void
}}
"""
    return f"""declare i64 @llvm.aarch64.get.fpcr()
declare void @llvm.aarch64.set.fpcr(i64)
define void @{name}({params}) nounwind {{
  %saved = call i64 @llvm.aarch64.get.fpcr()
  call void @llvm.aarch64.set.fpcr(i64 0)
  call void @{body}({params})
  call void @llvm.aarch64.set.fpcr(i64 %saved)
  ret void
}}
"""


_ITEMS = """
; executes chunk `chunk` of one item
define internal void @run_item(ptr %item, i64 %chunk, i64 %chunks, ptr %halt) nounwind noinline {
  %run = load ptr, ptr %item, align 8
  %argsp = getelementptr i8, ptr %item, i64 16
  %args = load ptr, ptr %argsp, align 8
  call void %run(i64 %chunk, i64 %chunks, ptr %args, ptr %halt)
  ret void
}

; executes a chunk of a batch: the items' chunks are numbered one after another
define internal void @run_chunk(ptr %items, i64 %number, ptr %halt) nounwind noinline {
entry:
  br label %look
look:
  %item = phi ptr [ %items, %entry ], [ %following, %skip ]
  %chunk = phi i64 [ %number, %entry ], [ %rest, %skip ]
  %chunksp = getelementptr i8, ptr %item, i64 24
  %chunks = load i64, ptr %chunksp, align 8
  %here = icmp slt i64 %chunk, %chunks
  br i1 %here, label %run, label %skip
skip:
  %following = getelementptr i8, ptr %item, i64 32
  %rest = sub i64 %chunk, %chunks
  br label %look
run:
  call void @run_item(ptr %item, i64 %chunk, i64 %chunks, ptr %halt)
  ret void
}

; chunks of every item; returns their sum, or 0 when no item has two groups (few: when there are no two chunks).  The
; items get of `limit` chunks what their groups are of all groups, rounded, but two at least; few: `limit` each
define internal i64 @plan_chunks(ptr %items, i64 %n, i64 %limit, i1 %few) nounwind noinline {
entry:
  br label %sum
sum:
  %k = phi i64 [ 0, %entry ], [ %k1, %add ]
  %all = phi i64 [ 0, %entry ], [ %all1, %add ]
  %others = icmp slt i64 %k, %n
  br i1 %others, label %add, label %begin
add:
  %next = getelementptr [32 x i8], ptr %items, i64 %k
  %size = call i64 @groups_of(ptr %next)
  %sizep = getelementptr i8, ptr %next, i64 24
  store i64 %size, ptr %sizep, align 8
  %all1 = add i64 %all, %size
  %k1 = add i64 %k, 1
  br label %sum
begin:
  %half = lshr i64 %all, 1
  br label %each
each:
  %i = phi i64 [ 0, %begin ], [ %i1, %one ]
  %total = phi i64 [ 0, %begin ], [ %total1, %one ]
  %shared = phi i1 [ false, %begin ], [ %shared1, %one ]
  %more = icmp slt i64 %i, %n
  br i1 %more, label %one, label %leave
one:
  %item = getelementptr [32 x i8], ptr %items, i64 %i
  %chunksp = getelementptr i8, ptr %item, i64 24
  %groups = load i64, ptr %chunksp, align 8
  %weighed = mul i64 %groups, %limit
  %rounded = add i64 %weighed, %half
  %divisor = call i64 @llvm.umax.i64(i64 %all, i64 1)
  %part = udiv i64 %rounded, %divisor
  %fair = call i64 @llvm.umax.i64(i64 %part, i64 2)
  %most = select i1 %few, i64 %limit, i64 %fair
  %chunks = call i64 @llvm.umin.i64(i64 %groups, i64 %most)
  store i64 %chunks, ptr %chunksp, align 8
  %total1 = add i64 %total, %chunks
  %several = icmp sge i64 %chunks, 2
  %second = icmp sge i64 %total1, 2
  %enough = and i1 %few, %second
  %worth = or i1 %several, %enough
  %shared1 = or i1 %shared, %worth
  %i1 = add i64 %i, 1
  br label %each
leave:
  %result = select i1 %shared, i64 %total, i64 0
  ret i64 %result
}

define internal i64 @groups_of(ptr %item) nounwind noinline {
  %gridp = getelementptr i8, ptr %item, i64 8
  %grid = load ptr, ptr %gridp, align 8
  %argsp = getelementptr i8, ptr %item, i64 16
  %args = load ptr, ptr %argsp, align 8
  %groups = call i64 %grid(ptr %args)
  %empty = icmp slt i64 %groups, 0
  %some = select i1 %empty, i64 0, i64 %groups
  ret i64 %some
}

; a copy as an item: args {dst, src, bytes}; one group per 32 KiB, pieces in multiples of 64 bytes
define i64 @m3_copy_grid(ptr %args) nounwind {
  %bytesp = getelementptr i8, ptr %args, i64 16
  %bytes = load i64, ptr %bytesp, align 8
  %groups = lshr i64 %bytes, 15
  ret i64 %groups
}

declare i64 @llvm.umin.i64(i64, i64)
declare i64 @llvm.umax.i64(i64, i64)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
define void @m3_copy(i64 %chunk, i64 %chunks, ptr %args, ptr %halt) nounwind {
  %dst = load ptr, ptr %args, align 8
  %srcp = getelementptr i8, ptr %args, i64 8
  %src = load ptr, ptr %srcp, align 8
  %bytesp = getelementptr i8, ptr %args, i64 16
  %bytes = load i64, ptr %bytesp, align 8
  %share = udiv i64 %bytes, %chunks
  %above = add i64 %share, 64
  %piece = and i64 %above, -64
  %from = mul i64 %chunk, %piece
  %lo = call i64 @llvm.umin.i64(i64 %from, i64 %bytes)
  %end = add i64 %lo, %piece
  %hi = call i64 @llvm.umin.i64(i64 %end, i64 %bytes)
  %size = sub i64 %hi, %lo
  %to = getelementptr i8, ptr %dst, i64 %lo
  %at = getelementptr i8, ptr %src, i64 %lo
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %at, i64 %size, i1 false)
  ret void
}
"""

_LAUNCH = """
define i64 @m3_launch(ptr %call) nounwind {
entry:
  %pool = load ptr, ptr %call, align 8
  %regionp = getelementptr i8, ptr %call, i64 8
  %region = load ptr, ptr %regionp, align 8
  %framep = getelementptr i8, ptr %call, i64 16
  %frame = load ptr, ptr %framep, align 8
  %nthp = getelementptr i8, ptr %call, i64 24
  %nth = load i64, ptr %nthp, align 8
  %single = icmp sle i64 %nth, 1
  br i1 %single, label %alone, label %acquire
acquire:
  %busyp = getelementptr i8, ptr %pool, i64 256
  %pair = cmpxchg ptr %busyp, i32 0, i32 1 acquire monotonic
  %got = extractvalue { i32, i1 } %pair, 1
  br i1 %got, label %together, label %alone
alone:
  call void %region(ptr %frame, ptr null)
  br label %leave
together:
  %threadsp = getelementptr i8, ptr %pool, i64 136
  store atomic i64 %nth, ptr %threadsp monotonic, align 8
  call void %region(ptr %frame, ptr %pool)
  store atomic i32 0, ptr %busyp release, align 4
  br label %leave
leave:
  %exitp = getelementptr i8, ptr %frame, i64 EXIT_BYTE
  %exit = load i64, ptr %exitp, align 8
  ret i64 %exit
}

; waits until no region runs, then tells workers 1 .. nth-1 to return; the pool stays busy for good
define void @m3_stop(ptr %pool, i64 %nth) nounwind {
entry:
  %busyp = getelementptr i8, ptr %pool, i64 256
  br label %acquire
acquire:
  %pair = cmpxchg ptr %busyp, i32 0, i32 1 acquire monotonic
  %got = extractvalue { i32, i1 } %pair, 1
  br i1 %got, label %tell, label %later
later:
  %r = call i32 @sched_yield()
  br label %acquire
tell:
  %stoppingp = getelementptr i8, ptr %pool, i64 144
  store atomic i32 1, ptr %stoppingp seq_cst, align 4
  fence seq_cst
  call void @rouse(ptr %pool, i64 %nth)
  ret void
}
"""
