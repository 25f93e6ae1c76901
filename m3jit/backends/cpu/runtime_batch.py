"""Native support code for regions entered by several contexts at once (batch_region.py): which contexts run a block,
and gathering their launches.

One array of words, `Work`, describes the entry.  A launch is described by constant words: run, grid, number of
arguments, index of the argument that counts rows (-1: none), 1 if its work is worth sharing (0: it is tiny), then for
each argument five words

    word, constant     its value: word `word` of the context's frame, or the constant where `word` is negative
    kind               ROWS for the argument that counts rows, else 0
    word, constant     bytes of a row, given as the value is; 0 for what serves all rows

`m3_gather` puts one item for each active context on the list of pending ones.  An item whose rows continue those of
the item before, and which is equal to it otherwise, is joined to it.  `m3_flush` executes what is pending.
Chains of launches: runtime_chains.py.
"""
from __future__ import annotations

from enum import IntEnum

from m3jit.backends.cpu.runtime_chains import CHAIN, UNEVEN
from m3jit.backends.cpu.runtime_jobs import ITEM_WORDS, MOST_ITEMS

ROWS = 2
HEAD_WORDS, ARGUMENT_WORDS = 5, 5


class Work(IntEnum):
    """Words that describe an entry."""
    CONTEXTS = 0       # in: number of contexts
    FRAMES = 1         # in: their frames, one behind the other
    STRIDE = 2         # in: bytes from one frame to the next
    EXIT = 3           # (the word that a launch of a single region returns)
    ITEMS = 4          # in: room for MOST_ITEMS items
    SLOTS = 5          # in: room for their arguments
    PENDING = 6        # items gathered, not executed
    USED = 7           # slots they use
    ACTIVE = 8         # contexts that run the present block
    LIST = 9           # in: room for their numbers
    STATE = 10         # in: for each context the block it is at, -1 when it has left; all 0 on entry
    POOL = 11
    LAUNCHED = 12      # in/out: items executed, without the tiny ones of chains
    JOINED = 13        # in/out: launches that went into another context's item, likewise
    HALT = 14          # in: {pointer to a stop word, skipped} of all contexts together
    GROUPS = 15        # groups of the chain that is gathered; 1 outside of chains
    LINK = 16          # launches of it that were gathered
    LIMIT = 17         # items that may be pending; -1 in a chain, for which there is room
    WORDS = 18


def batch_text() -> str:
    """IR of the functions in SYMBOLS; needs m3_run's parts."""
    text = _CHOOSE + _GATHER + _FLUSH + CHAIN
    for word in sorted(Work, key=lambda w: -len(w.name)):
        text = text.replace(f"WORK_{word.name}", str(int(word)))
    for name, value in (("MOST_ITEMS", MOST_ITEMS), ("ITEM_BYTES", 8 * ITEM_WORDS), ("UNEVEN", UNEVEN)):
        text = text.replace(name, str(value))
    return text


SYMBOLS = ("m3_choose", "m3_gather", "m3_flush", "m3_flush_alone", "m3_chain", "m3_flush_chain")

_CHOOSE = """
; the lowest block that a context is at, or -1; lists the contexts that are there
define i64 @m3_choose(ptr %work) nounwind {
entry:
  %np = getelementptr i64, ptr %work, i64 WORK_CONTEXTS
  %n = load i64, ptr %np, align 8
  %statep = getelementptr i64, ptr %work, i64 WORK_STATE
  %state = load ptr, ptr %statep, align 8
  %listp = getelementptr i64, ptr %work, i64 WORK_LIST
  %list = load ptr, ptr %listp, align 8
  br label %find
find:
  %i = phi i64 [ 0, %entry ], [ %i1, %visit ]
  %least = phi i64 [ -1, %entry ], [ %least1, %visit ]
  %more = icmp slt i64 %i, %n
  br i1 %more, label %visit, label %collect
visit:
  %at = getelementptr i64, ptr %state, i64 %i
  %block = load i64, ptr %at, align 8
  %least1 = call i64 @llvm.umin.i64(i64 %least, i64 %block)
  %i1 = add i64 %i, 1
  br label %find
collect:
  %k = phi i64 [ 0, %find ], [ %k1, %look ]
  %count = phi i64 [ 0, %find ], [ %count1, %look ]
  %rest = icmp slt i64 %k, %n
  br i1 %rest, label %look, label %leave
look:
  %there = getelementptr i64, ptr %state, i64 %k
  %own = load i64, ptr %there, align 8
  %put = getelementptr i64, ptr %list, i64 %count
  store i64 %k, ptr %put, align 8
  %same = icmp eq i64 %own, %least
  %one = zext i1 %same to i64
  %count1 = add i64 %count, %one
  %k1 = add i64 %k, 1
  br label %collect
leave:
  %activep = getelementptr i64, ptr %work, i64 WORK_ACTIVE
  store i64 %count, ptr %activep, align 8
  ret i64 %least
}
"""

_GATHER = """
; the launch `desc` of every active context joins the pending items
define void @m3_gather(ptr %work, ptr %desc) nounwind {
entry:
  %nargsp = getelementptr i64, ptr %desc, i64 2
  %nargs = load i64, ptr %nargsp, align 8
  %rowsp = getelementptr i64, ptr %desc, i64 3
  %rows = load i64, ptr %rowsp, align 8
  %byrow = icmp sge i64 %rows, 0
  %worthp = getelementptr i64, ptr %desc, i64 4
  %worth = load i64, ptr %worthp, align 8
  %arguments = getelementptr i64, ptr %desc, i64 5
  %rowsdesc = getelementptr [5 x i64], ptr %arguments, i64 %rows
  %framesp = getelementptr i64, ptr %work, i64 WORK_FRAMES
  %frames = load ptr, ptr %framesp, align 8
  %stridep = getelementptr i64, ptr %work, i64 WORK_STRIDE
  %stride = load i64, ptr %stridep, align 8
  %activep = getelementptr i64, ptr %work, i64 WORK_ACTIVE
  %active = load i64, ptr %activep, align 8
  %listp = getelementptr i64, ptr %work, i64 WORK_LIST
  %list = load ptr, ptr %listp, align 8
  %itemsp = getelementptr i64, ptr %work, i64 WORK_ITEMS
  %items = load ptr, ptr %itemsp, align 8
  %slotsp = getelementptr i64, ptr %work, i64 WORK_SLOTS
  %slots = load ptr, ptr %slotsp, align 8
  %pendingp = getelementptr i64, ptr %work, i64 WORK_PENDING
  %usedp = getelementptr i64, ptr %work, i64 WORK_USED
  %joinedp = getelementptr i64, ptr %work, i64 WORK_JOINED
  %groupsp = getelementptr i64, ptr %work, i64 WORK_GROUPS
  %groups = load i64, ptr %groupsp, align 8
  %limitp = getelementptr i64, ptr %work, i64 WORK_LIMIT
  %limit = load i64, ptr %limitp, align 8
  %chained = icmp slt i64 %limit, 0
  %counts = select i1 %chained, i64 %worth, i64 1
  %linkp = getelementptr i64, ptr %work, i64 WORK_LINK
  %link = load i64, ptr %linkp, align 8
  %link1 = add i64 %link, 1
  store i64 %link1, ptr %linkp, align 8
  %high = shl i64 %link, 32
  %tag = or i64 %high, %worth
  br label %each
each:
  ; open: the arguments of this launch's newest item, if others can join it; group: of the context before
  %i = phi i64 [ 0, %entry ], [ %i1, %next ]
  %open = phi ptr [ null, %entry ], [ %open1, %next ]
  %last = phi i64 [ 0, %entry ], [ %group, %next ]
  %more = icmp slt i64 %i, %active
  br i1 %more, label %one, label %leave
one:
  %at = getelementptr i64, ptr %list, i64 %i
  %context = load i64, ptr %at, align 8
  %offset = mul i64 %context, %stride
  %frame = getelementptr i8, ptr %frames, i64 %offset
  %share = mul i64 %i, %groups
  %group = udiv i64 %share, %active
  %none = icmp eq ptr %open, null
  %other = icmp ne i64 %group, %last
  %closed = or i1 %none, %other
  br i1 %closed, label %room, label %compare
compare:
  %haveatp = getelementptr i64, ptr %open, i64 %rows
  %have = load i64, ptr %haveatp, align 8
  br label %look
look:
  %a = phi i64 [ 0, %compare ], [ %a1, %same ]
  %left = icmp slt i64 %a, %nargs
  br i1 %left, label %check, label %join
check:
  %d = getelementptr [5 x i64], ptr %arguments, i64 %a
  %word = load i64, ptr %d, align 8
  %constp = getelementptr i64, ptr %d, i64 1
  %inframe = getelementptr i64, ptr %frame, i64 %word
  %isconst = icmp slt i64 %word, 0
  %vp = select i1 %isconst, ptr %constp, ptr %inframe
  %v = load i64, ptr %vp, align 8
  %kindp = getelementptr i64, ptr %d, i64 2
  %kind = load i64, ptr %kindp, align 8
  %swordp = getelementptr i64, ptr %d, i64 3
  %sword = load i64, ptr %swordp, align 8
  %sconstp = getelementptr i64, ptr %d, i64 4
  %sinframe = getelementptr i64, ptr %frame, i64 %sword
  %sisconst = icmp slt i64 %sword, 0
  %sp = select i1 %sisconst, ptr %sconstp, ptr %sinframe
  %s = load i64, ptr %sp, align 8
  %ownp = getelementptr i64, ptr %open, i64 %a
  %own = load i64, ptr %ownp, align 8
  %step = mul i64 %have, %s
  %wanted = add i64 %own, %step
  %fits = icmp eq i64 %v, %wanted
  %isrows = icmp eq i64 %kind, 2
  %ok = or i1 %fits, %isrows
  br i1 %ok, label %same, label %room
same:
  %a1 = add i64 %a, 1
  br label %look
join:
  %rword = load i64, ptr %rowsdesc, align 8
  %rconstp = getelementptr i64, ptr %rowsdesc, i64 1
  %rinframe = getelementptr i64, ptr %frame, i64 %rword
  %risconst = icmp slt i64 %rword, 0
  %rp = select i1 %risconst, ptr %rconstp, ptr %rinframe
  %r = load i64, ptr %rp, align 8
  %sum = add i64 %have, %r
  store i64 %sum, ptr %haveatp, align 8
  %joined = load i64, ptr %joinedp, align 8
  %joined1 = add i64 %joined, %counts
  store i64 %joined1, ptr %joinedp, align 8
  br label %next
room:
  %pending = load i64, ptr %pendingp, align 8
  %full = icmp eq i64 %pending, %limit
  br i1 %full, label %flush, label %place
flush:
  call void @m3_flush(ptr %work)
  br label %place
place:
  %count = load i64, ptr %pendingp, align 8
  %count1 = add i64 %count, 1
  store i64 %count1, ptr %pendingp, align 8
  %launchedp = getelementptr i64, ptr %work, i64 WORK_LAUNCHED
  %launched = load i64, ptr %launchedp, align 8
  %launched1 = add i64 %launched, %counts
  store i64 %launched1, ptr %launchedp, align 8
  %used = load i64, ptr %usedp, align 8
  %used1 = add i64 %used, %nargs
  store i64 %used1, ptr %usedp, align 8
  %item = getelementptr [ITEM_BYTES x i8], ptr %items, i64 %count
  %slot = getelementptr i64, ptr %slots, i64 %used
  %run = load ptr, ptr %desc, align 8
  store ptr %run, ptr %item, align 8
  %gridp = getelementptr i64, ptr %desc, i64 1
  %grid = load ptr, ptr %gridp, align 8
  %itemgrid = getelementptr i64, ptr %item, i64 1
  store ptr %grid, ptr %itemgrid, align 8
  %itemargs = getelementptr i64, ptr %item, i64 2
  store ptr %slot, ptr %itemargs, align 8
  %grouped = shl i64 %group, 1
  %tagged = or i64 %tag, %grouped
  %itemtag = getelementptr i64, ptr %item, i64 3
  store i64 %tagged, ptr %itemtag, align 8
  br label %fill
fill:
  %f = phi i64 [ 0, %place ], [ %f1, %put ]
  %unfilled = icmp slt i64 %f, %nargs
  br i1 %unfilled, label %put, label %placed
put:
  %fd = getelementptr [5 x i64], ptr %arguments, i64 %f
  %fword = load i64, ptr %fd, align 8
  %fconstp = getelementptr i64, ptr %fd, i64 1
  %finframe = getelementptr i64, ptr %frame, i64 %fword
  %fisconst = icmp slt i64 %fword, 0
  %fp = select i1 %fisconst, ptr %fconstp, ptr %finframe
  %fv = load i64, ptr %fp, align 8
  %fat = getelementptr i64, ptr %slot, i64 %f
  store i64 %fv, ptr %fat, align 8
  %f1 = add i64 %f, 1
  br label %fill
placed:
  %opened = select i1 %byrow, ptr %slot, ptr null
  br label %next
next:
  %open1 = phi ptr [ %open, %join ], [ %opened, %placed ]
  %i1 = add i64 %i, 1
  br label %each
leave:
  ret void
}
"""

_FLUSH = """
; takes the pending items off the list: how many
define internal i64 @take_pending(ptr %work) nounwind noinline {
  %pendingp = getelementptr i64, ptr %work, i64 WORK_PENDING
  %n = load i64, ptr %pendingp, align 8
  store i64 0, ptr %pendingp, align 8
  %usedp = getelementptr i64, ptr %work, i64 WORK_USED
  store i64 0, ptr %usedp, align 8
  ret i64 %n
}

; executes the pending items
define void @m3_flush(ptr %work) nounwind {
  %poolp = getelementptr i64, ptr %work, i64 WORK_POOL
  %pool = load ptr, ptr %poolp, align 8
  call void @flush_on(ptr %work, ptr %pool)
  ret void
}

; executes the pending items one after another on the calling thread
define void @m3_flush_alone(ptr %work) nounwind {
  call void @flush_on(ptr %work, ptr null)
  ret void
}

define internal void @flush_on(ptr %work, ptr %pool) nounwind noinline {
entry:
  %n = call i64 @take_pending(ptr %work)
  %none = icmp eq i64 %n, 0
  br i1 %none, label %leave, label %run
run:
  %itemsp = getelementptr i64, ptr %work, i64 WORK_ITEMS
  %items = load ptr, ptr %itemsp, align 8
  %haltp = getelementptr i64, ptr %work, i64 WORK_HALT
  %halt = load ptr, ptr %haltp, align 8
  call void @run_items(ptr %pool, ptr %items, i64 %n, i1 true, ptr %halt)
  br label %leave
leave:
  ret void
}
"""
