"""Native support code: chains of launches that each of several contexts has to execute in order (runtime_batch.py).

Between `m3_chain` and `m3_flush_chain` launches are gathered that make no context wait for another.  The contexts are
dealt out in as many groups as there are threads; rows are joined within a group, and a group's items are executed in
order by one thread.  So some small launches cost one job together, and what one of them writes is in the caches of the
thread that reads it.  Where the groups' shares of what is worth sharing differ too much (one context with a long text),
it is launch after launch.  What follows a launch that was cut short by the stop word is not executed: it might read
anything.

The fourth word of such an item, which otherwise counts its chunks, is launch << 32 | group << 1 | worth sharing.
"""
from __future__ import annotations

UNEVEN = 8             # groups of kernels by which the largest share may exceed the average; or by an eighth of it

CHAIN = """
; begins a chain; nothing is pending
define void @m3_chain(ptr %work) nounwind {
entry:
  %poolp = getelementptr i64, ptr %work, i64 WORK_POOL
  %pool = load ptr, ptr %poolp, align 8
  %alone = icmp eq ptr %pool, null
  br i1 %alone, label %begin, label %several
several:
  %threadsp = getelementptr i8, ptr %pool, i64 136
  %threads = load i64, ptr %threadsp, align 8
  br label %begin
begin:
  %groups = phi i64 [ 1, %entry ], [ %threads, %several ]
  %activep = getelementptr i64, ptr %work, i64 WORK_ACTIVE
  %active = load i64, ptr %activep, align 8
  %fewer = call i64 @llvm.umin.i64(i64 %groups, i64 %active)
  %groupsp = getelementptr i64, ptr %work, i64 WORK_GROUPS
  store i64 %fewer, ptr %groupsp, align 8
  %linkp = getelementptr i64, ptr %work, i64 WORK_LINK
  store i64 0, ptr %linkp, align 8
  %limitp = getelementptr i64, ptr %work, i64 WORK_LIMIT
  store i64 -1, ptr %limitp, align 8
  ret void
}

; executes a chain
define void @m3_flush_chain(ptr %work) nounwind {
entry:
  %job = alloca [4 x i64], align 64
  %chain = alloca [3 x i64], align 64
  %groupsp = getelementptr i64, ptr %work, i64 WORK_GROUPS
  %groups = load i64, ptr %groupsp, align 8
  store i64 1, ptr %groupsp, align 8
  %limitp = getelementptr i64, ptr %work, i64 WORK_LIMIT
  store i64 MOST_ITEMS, ptr %limitp, align 8
  %n = call i64 @take_pending(ptr %work)
  %itemsp = getelementptr i64, ptr %work, i64 WORK_ITEMS
  %items = load ptr, ptr %itemsp, align 8
  %haltp = getelementptr i64, ptr %work, i64 WORK_HALT
  %halt = load ptr, ptr %haltp, align 8
  %poolp = getelementptr i64, ptr %work, i64 WORK_POOL
  %pool = load ptr, ptr %poolp, align 8
  %none = icmp eq i64 %n, 0
  br i1 %none, label %leave, label %some
some:
  %even = call i1 @even(ptr %items, i64 %n, i64 %groups)
  br i1 %even, label %share, label %links
share:
  store ptr @chain_chunk, ptr %job, align 8
  %gridp = getelementptr i64, ptr %job, i64 1
  store ptr @chain_grid, ptr %gridp, align 8
  %argsp = getelementptr i64, ptr %job, i64 2
  store ptr %chain, ptr %argsp, align 8
  store ptr %items, ptr %chain, align 8
  %countp = getelementptr i64, ptr %chain, i64 1
  store i64 %n, ptr %countp, align 8
  %ownp = getelementptr i64, ptr %chain, i64 2
  store i64 %groups, ptr %ownp, align 8
  call void @run_items(ptr %pool, ptr %job, i64 1, i1 true, ptr %halt)
  br label %leave
links:
  ; from: the first item of a launch; to: items behind it that belong to it too, as many as a job takes
  %from = phi i64 [ 0, %some ], [ %to, %run ]
  %left = icmp slt i64 %from, %n
  br i1 %left, label %begin, label %leave
begin:
  %first = getelementptr [ITEM_BYTES x i8], ptr %items, i64 %from
  %firsttag = getelementptr i64, ptr %first, i64 3
  %tag = load i64, ptr %firsttag, align 8
  %link = lshr i64 %tag, 32
  %most = add i64 %from, MOST_ITEMS
  br label %look
look:
  %to = phi i64 [ %from, %begin ], [ %to1, %same ]
  %inside = icmp slt i64 %to, %n
  %room = icmp slt i64 %to, %most
  %both = and i1 %inside, %room
  br i1 %both, label %check, label %run
check:
  %item = getelementptr [ITEM_BYTES x i8], ptr %items, i64 %to
  %itemtag = getelementptr i64, ptr %item, i64 3
  %owntag = load i64, ptr %itemtag, align 8
  %ownlink = lshr i64 %owntag, 32
  %belongs = icmp eq i64 %ownlink, %link
  br i1 %belongs, label %same, label %run
same:
  %to1 = add i64 %to, 1
  br label %look
run:
  %count = sub i64 %to, %from
  call void @run_items(ptr %pool, ptr %first, i64 %count, i1 true, ptr %halt)
  %skippedp = getelementptr i8, ptr %halt, i64 8
  %skipped = load atomic i32, ptr %skippedp monotonic, align 4
  %cut = icmp ne i32 %skipped, 0
  br i1 %cut, label %leave, label %links
leave:
  ret void
}

; the first of items from..n-1 whose fourth word, masked, is the one that is wanted; n where there is none
define internal i64 @next_item(ptr %items, i64 %from, i64 %n, i64 %mask, i64 %wanted) nounwind {
entry:
  br label %look
look:
  %i = phi i64 [ %from, %entry ], [ %i1, %next ]
  %inside = icmp slt i64 %i, %n
  br i1 %inside, label %visit, label %none
visit:
  %item = getelementptr [ITEM_BYTES x i8], ptr %items, i64 %i
  %tagp = getelementptr i64, ptr %item, i64 3
  %tag = load i64, ptr %tagp, align 8
  %seen = and i64 %tag, %mask
  %fits = icmp eq i64 %seen, %wanted
  br i1 %fits, label %found, label %next
next:
  %i1 = add i64 %i, 1
  br label %look
found:
  ret i64 %i
none:
  ret i64 %n
}

; is the largest group's share of what is worth sharing about the average?
define internal i1 @even(ptr %items, i64 %n, i64 %groups) nounwind noinline {
entry:
  br label %each
each:
  %g = phi i64 [ 0, %entry ], [ %g1, %summed ]
  %total = phi i64 [ 0, %entry ], [ %total1, %summed ]
  %most = phi i64 [ 0, %entry ], [ %most1, %summed ]
  %more = icmp slt i64 %g, %groups
  br i1 %more, label %begin, label %decide
begin:
  %group = shl i64 %g, 1
  %wanted = or i64 %group, 1
  br label %look
look:
  %from = phi i64 [ 0, %begin ], [ %i1, %count ]
  %sum = phi i64 [ 0, %begin ], [ %sum1, %count ]
  %i = call i64 @next_item(ptr %items, i64 %from, i64 %n, i64 4294967295, i64 %wanted)
  %found = icmp slt i64 %i, %n
  br i1 %found, label %count, label %summed
count:
  %item = getelementptr [ITEM_BYTES x i8], ptr %items, i64 %i
  %gridp = getelementptr i64, ptr %item, i64 1
  %grid = load ptr, ptr %gridp, align 8
  %argsp = getelementptr i64, ptr %item, i64 2
  %args = load ptr, ptr %argsp, align 8
  %size = call i64 %grid(ptr %args)
  %sum1 = add i64 %sum, %size
  %i1 = add i64 %i, 1
  br label %look
summed:
  %total1 = add i64 %total, %sum
  %greater = icmp sgt i64 %sum, %most
  %most1 = select i1 %greater, i64 %sum, i64 %most
  %g1 = add i64 %g, 1
  br label %each
decide:
  ; most <= total / groups + max(UNEVEN, total / groups / 8)
  %average = sdiv i64 %total, %groups
  %eighth = sdiv i64 %average, 8
  %small = icmp slt i64 %eighth, UNEVEN
  %allowed = select i1 %small, i64 UNEVEN, i64 %eighth
  %limit = add i64 %average, %allowed
  %ok = icmp sle i64 %most, %limit
  ret i1 %ok
}

; a chain as an item: args {items, their number, groups}; a group of the grid is one of contexts
define internal i64 @chain_grid(ptr %args) nounwind {
  %groupsp = getelementptr i64, ptr %args, i64 2
  %groups = load i64, ptr %groupsp, align 8
  ret i64 %groups
}

define internal void @chain_chunk(i64 %chunk, i64 %chunks, ptr %args, ptr %halt) nounwind {
entry:
  %items = load ptr, ptr %args, align 8
  %word = load ptr, ptr %halt, align 8
  %skippedp = getelementptr i8, ptr %halt, i64 8
  %countp = getelementptr i64, ptr %args, i64 1
  %n = load i64, ptr %countp, align 8
  %groupsp = getelementptr i64, ptr %args, i64 2
  %groups = load i64, ptr %groupsp, align 8
  %before = mul i64 %groups, %chunk
  %begin = udiv i64 %before, %chunks
  %following = add i64 %before, %groups
  %end = udiv i64 %following, %chunks
  br label %each
each:
  %g = phi i64 [ %begin, %entry ], [ %g1, %done ]
  %more = icmp slt i64 %g, %end
  br i1 %more, label %walk, label %leave
walk:
  %wanted = shl i64 %g, 1
  br label %look
look:
  %from = phi i64 [ 0, %walk ], [ %i1, %execute ]
  %i = call i64 @next_item(ptr %items, i64 %from, i64 %n, i64 4294967294, i64 %wanted)
  %found = icmp slt i64 %i, %n
  br i1 %found, label %run, label %done
run:
  %skipped = load atomic i32, ptr %skippedp monotonic, align 4
  %cut = icmp ne i32 %skipped, 0
  br i1 %cut, label %leave, label %ask
ask:
  %urgent = call i1 @halted(ptr %word)
  br i1 %urgent, label %skip, label %execute
skip:
  call void @note_skipped(ptr %halt)
  br label %leave
execute:
  %item = getelementptr [ITEM_BYTES x i8], ptr %items, i64 %i
  call void @run_item(ptr %item, i64 0, i64 1, ptr %halt)
  %i1 = add i64 %i, 1
  br label %look
done:
  %g1 = add i64 %g, 1
  br label %each
leave:
  ret void
}
"""
