"""Native support code: publishing a job, claiming its chunks, and the workers' loop (memory layout: runtime.py)."""
from __future__ import annotations

MOST_ITEMS = 32            # of a batch: a share of MOST_ITEMS * CHUNKS_PER_THREAD chunks fits the ticket's 16 bits
ITEM_WORDS = 4

JOB = """
; claims and executes chunks of one share until none is left; returns how many.  back: from its end, so that the owner
; goes on where it is and finds what it has asked of memory ahead.  A chunk that is claimed when the stop word is urgent
; is not executed
define internal i64 @take_share(ptr %share, i1 %back) nounwind noinline {
entry:
  %beginp = getelementptr i8, ptr %share, i64 8
  %itemsp = getelementptr i8, ptr %share, i64 16
  %haltp = getelementptr i8, ptr %share, i64 24
  br label %look
look:
  %n = phi i64 [ 0, %entry ], [ %n, %claim ], [ %n1, %counted ]
  %ticket = load atomic i64, ptr %share acquire, align 8
  %left = and i64 %ticket, 65535
  %none = icmp eq i64 %left, 0
  br i1 %none, label %leave, label %claim
claim:
  %begin = load atomic i64, ptr %beginp monotonic, align 8
  %items = load atomic ptr, ptr %itemsp monotonic, align 8
  %halt = load atomic ptr, ptr %haltp monotonic, align 8
  %high = lshr i64 %ticket, 16
  %first = and i64 %high, 65535
  %behind = add i64 %first, %left
  %last = sub i64 %behind, 1
  %number = select i1 %back, i64 %last, i64 %first
  ; one fewer is left, and the first is the one after it
  %change = select i1 %back, i64 -1, i64 65535
  %taken = add i64 %ticket, %change
  %pair = cmpxchg ptr %share, i64 %ticket, i64 %taken acq_rel monotonic
  %got = extractvalue { i64, i1 } %pair, 1
  br i1 %got, label %run, label %look
run:
  %word = load ptr, ptr %halt, align 8
  %urgent = call i1 @halted(ptr %word)
  br i1 %urgent, label %skip, label %execute
skip:
  call void @note_skipped(ptr %halt)
  br label %counted
execute:
  %chunk = add i64 %begin, %number
  call void @run_chunk(ptr %items, i64 %chunk, ptr %halt)
  br label %counted
counted:
  %n1 = add i64 %n, 1
  br label %look
leave:
  ret i64 %n
}

; chunks of the other shares, beginning with the next thread's; returns how many
define internal i64 @take_others(ptr %pool, i64 %tid) nounwind noinline {
entry:
  %threadsp = getelementptr i8, ptr %pool, i64 136
  %threads = load atomic i64, ptr %threadsp monotonic, align 8
  br label %each
each:
  %k = phi i64 [ 1, %entry ], [ %k1, %one ]
  %n = phi i64 [ 0, %entry ], [ %n1, %one ]
  %more = icmp slt i64 %k, %threads
  br i1 %more, label %one, label %leave
one:
  %sum = add i64 %tid, %k
  %over = icmp sge i64 %sum, %threads
  %wrapped = sub i64 %sum, %threads
  %t = select i1 %over, i64 %wrapped, i64 %sum
  %share = call ptr @share_of(ptr %pool, i64 %t)
  %some = call i64 @take_share(ptr %share, i1 true)
  %n1 = add i64 %n, %some
  %k1 = add i64 %k, 1
  br label %each
leave:
  ret i64 %n
}

define internal ptr @share_of(ptr %pool, i64 %t) nounwind noinline {
  %shares = getelementptr i8, ptr %pool, i64 2560
  %share = getelementptr [128 x i8], ptr %shares, i64 %t
  ret ptr %share
}

; makes the job known: `total` chunks in `threads` shares, the first total % threads of them one larger
define internal void @publish(ptr %pool, ptr %items, i64 %total, i64 %threads, ptr %halt) nounwind noinline {
entry:
  %jobp = getelementptr i8, ptr %pool, i64 128
  store atomic i64 0, ptr %pool monotonic, align 8
  %old = load i64, ptr %jobp, align 8
  %job = add i64 %old, 1
  store i64 %job, ptr %jobp, align 8
  %number = shl i64 %job, 32
  %base = udiv i64 %total, %threads
  %extra = urem i64 %total, %threads
  br label %each
each:
  ; from the last share down to the caller's own
  %t = phi i64 [ %threads, %entry ], [ %t1, %next ]
  %end = phi i64 [ %total, %entry ], [ %start, %next ]
  %more = icmp sgt i64 %t, 0
  br i1 %more, label %one, label %leave
one:
  %t1 = sub i64 %t, 1
  %larger = icmp slt i64 %t1, %extra
  %unit = zext i1 %larger to i64
  %size = add i64 %base, %unit
  %start = sub i64 %end, %size
  %none = icmp eq i64 %size, 0
  br i1 %none, label %next, label %deal
deal:
  %share = call ptr @share_of(ptr %pool, i64 %t1)
  %beginp = getelementptr i8, ptr %share, i64 8
  store atomic i64 %start, ptr %beginp monotonic, align 8
  %itemsp = getelementptr i8, ptr %share, i64 16
  store atomic ptr %items, ptr %itemsp monotonic, align 8
  %haltp = getelementptr i8, ptr %share, i64 24
  store atomic ptr %halt, ptr %haltp monotonic, align 8
  %ticket = or i64 %number, %size
  store atomic i64 %ticket, ptr %share release, align 8
  br label %next
next:
  br label %each
leave:
  ; a worker says that it sleeps and then looks for work; here it is the other way round
  fence seq_cst
  %few = icmp slt i64 %total, %threads
  %helpers = select i1 %few, i64 %total, i64 %threads
  call void @rouse(ptr %pool, i64 %helpers)
  ret void
}

; wakes those of workers 1 .. nth-1 that sleep
define internal void @rouse(ptr %pool, i64 %nth) nounwind noinline {
entry:
  %all = getelementptr i8, ptr %pool, i64 512
  br label %each
each:
  %t = phi i64 [ 1, %entry ], [ %t1, %next ]
  %more = icmp slt i64 %t, %nth
  br i1 %more, label %one, label %leave
one:
  %sleeping = getelementptr i32, ptr %all, i64 %t
  %state = load atomic i32, ptr %sleeping seq_cst, align 4
  %asleep = icmp ne i32 %state, 0
  br i1 %asleep, label %up, label %next
up:
  store atomic i32 0, ptr %sleeping seq_cst, align 4
  call void @wake(ptr %sleeping)
  br label %next
next:
  %t1 = add i64 %t, 1
  br label %each
leave:
  ret void
}

; executes a batch of n independent items, with the pool's workers unless `pool` is null; small ones here
define void @m3_run(ptr %pool, ptr %items, i64 %n, ptr %halt) nounwind {
  call void @run_items(ptr %pool, ptr %items, i64 %n, i1 false, ptr %halt)
  ret void
}

; the same; each: items of one group are worth a chunk of their own
define internal void @run_items(ptr %pool, ptr %items, i64 %n, i1 %each, ptr %halt) nounwind noinline {
entry:
  %word = load ptr, ptr %halt, align 8
  %single = icmp eq ptr %pool, null
  br i1 %single, label %alone, label %share
alone:
  %i = phi i64 [ 0, %entry ], [ 0, %share ], [ %i1, %one ]
  %more = icmp slt i64 %i, %n
  br i1 %more, label %check, label %leave
check:
  %urgent = call i1 @halted(ptr %word)
  br i1 %urgent, label %skip, label %one
skip:
  call void @note_skipped(ptr %halt)
  br label %leave
one:
  %item = getelementptr [32 x i8], ptr %items, i64 %i
  call void @run_item(ptr %item, i64 0, i64 1, ptr %halt)
  %i1 = add i64 %i, 1
  br label %alone
share:
  %threadsp = getelementptr i8, ptr %pool, i64 136
  %threads = load i64, ptr %threadsp, align 8
  %limit = mul i64 %threads, CHUNKS_PER_THREAD
  %total = call i64 @plan_chunks(ptr %items, i64 %n, i64 %limit, i1 %each)
  %small = icmp eq i64 %total, 0
  br i1 %small, label %alone, label %job
job:
  call void @publish(ptr %pool, ptr %items, i64 %total, i64 %threads, ptr %halt)
  %own = call ptr @share_of(ptr %pool, i64 0)
  %first = call i64 @take_share(ptr %own, i1 false)
  %rest = call i64 @take_others(ptr %pool, i64 0)
  %mine = add i64 %first, %rest
  %others = sub i64 %total, %mine
  br label %look
look:
  %k = phi i32 [ 0, %job ], [ %k1, %again ]
  %finished = load atomic i64, ptr %pool acquire, align 8
  %complete = icmp eq i64 %finished, %others
  br i1 %complete, label %leave, label %wait
wait:
  %patient = icmp ult i32 %k, DONE_SPINS
  br i1 %patient, label %short, label %long
short:
  PAUSE
  br label %again
long:
  %r = call i32 @sched_yield()
  br label %again
again:
  %inc = add i32 %k, 1
  %k1 = select i1 %patient, i32 %inc, i32 %k
  br label %look
leave:
  ret void
}
"""

WORKER = """
define internal void @serve(ptr %pool, i64 %tid) nounwind noinline {
entry:
  %share = call ptr @share_of(ptr %pool, i64 %tid)
  %stoppingp = getelementptr i8, ptr %pool, i64 144
  %sleepers = getelementptr i8, ptr %pool, i64 512
  %sleeping = getelementptr i32, ptr %sleepers, i64 %tid
  %readiness = getelementptr i8, ptr %pool, i64 1536
  %ready = getelementptr i32, ptr %readiness, i64 %tid
  store atomic i32 1, ptr %ready release, align 4
  br label %look
look:
  %i = phi i32 [ 0, %entry ], [ 0, %worked ], [ %i1, %again ], [ %since, %up ]
  %n = call i64 @take_share(ptr %share, i1 false)
  %some = icmp ne i64 %n, 0
  br i1 %some, label %worked, label %idle
worked:
  %more = call i64 @take_others(ptr %pool, i64 %tid)
  %all = add i64 %n, %more
  %before = atomicrmw add ptr %pool, i64 %all acq_rel
  br label %look
idle:
  %stopping = load atomic i32, ptr %stoppingp acquire, align 4
  %stop = icmp ne i32 %stopping, 0
  br i1 %stop, label %leave, label %wait
wait:
  %i1 = add i32 %i, 1
  %patient = icmp ult i32 %i, IDLE_SPINS
  br i1 %patient, label %short, label %longer
short:
  PAUSE
  br label %again
longer:
  %yielding = icmp ult i32 %i, IDLE_LIMIT
  br i1 %yielding, label %yield, label %sleep
yield:
  %r = call i32 @sched_yield()
  br label %again
again:
  br label %look
sleep:
  ; say so, then look once more: whoever publishes looks for sleepers after publishing
  store atomic i32 1, ptr %sleeping seq_cst, align 4
  fence seq_cst
  %ticket = load atomic i64, ptr %share seq_cst, align 8
  %left = and i64 %ticket, 65535
  %called = icmp ne i64 %left, 0
  %halting = load atomic i32, ptr %stoppingp seq_cst, align 4
  %halt = icmp ne i32 %halting, 0
  %needed = or i1 %called, %halt
  br i1 %needed, label %up, label %down
down:
  call void @wait_on(ptr %sleeping, i32 1)
  br label %up
up:
  ; woken by a job: be patient again; woken by nothing: look once and sleep on
  %state = atomicrmw xchg ptr %sleeping, i32 0 seq_cst
  %woken = icmp eq i32 %state, 0
  %since = select i1 %woken, i32 0, i32 IDLE_LIMIT
  br label %look
leave:
  ret void
}
"""
