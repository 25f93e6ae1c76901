"""KV streams across storage tiers (0xE8-0xEF).  Moving, pinning and recalling never change what attention reads; lossy
compression and masks do, and are values of the stream."""
from m3jit.isa.fields import F32, R1, R2, R3, U16, U32, Enum, IntOrReg, PayloadFlag, Rd
from m3jit.isa.table import StateDoc, op

WHERE = StateDoc("which tier (regions 0x4, 0x14, 0x15) holds a stream's pages, outside the context root;"
                 " the pages are in it",
                 "not captured", "not rolled back: a tier never changes a value")
STREAM = StateDoc("the KV stream, a value of the context root", "O(1): pages are append-only and shared",
                  "the stream of the snapshot is put back, its mask and precision with it")
TIERS = "HOT WARM COLD REMOTE"
LAYER = IntOrReg(fmt="i")
_MAP = "KV tiering of the M3-AVM map"


@op(0xE8, "KV_TIER_MOVE", route="absent", state=WHERE, source=_MAP)
def kv_tier_move(m, kv: R1("state"), rd: Rd("int") = None, layer: LAYER[0, 4] = -1, tier: Enum(TIERS)[5] = "WARM",
                 first: U32[6] = 0, last: U32[10] = 2 ** 32 - 1):
    """Move the pages of LAYER (-1: all) that hold positions FIRST..LAST to TIER; rd = bytes moved."""


@op(0xE9, "KV_EVICT", route="absent", state=WHERE, source=_MAP)
def kv_evict(m, kv: R1("state"), rd: Rd("int") = None, layer: LAYER[0, 4] = -1, keep: U32[5] = 0,
             policy: Enum("LRU ATTENTION")[9] = "LRU"):
    """Drop HOT copies until KEEP pages of a layer are left there; rd = pages dropped.

    ATTENTION drops the pages that got least attention weight first.  Dropped pages stay in a lower tier."""


@op(0xEA, "KV_PIN", route="absent", state=WHERE, source=_MAP)
def kv_pin(m, kv: R1("state"), layer: LAYER[0, 4] = -1, tier: Enum(TIERS)[5] = "HOT",
           release: PayloadFlag(0)[6] = False):
    """Keep a layer's pages in TIER; RELEASE undoes it."""


@op(0xEB, "KV_RETRIEVE", route="absent", state=WHERE, source=_MAP)
def kv_retrieve(m, kv: R1("state"), rd: Rd("int") = None, layer: LAYER[0, 4] = -1, wait: PayloadFlag(0)[5] = False):
    """Bring evicted pages of a layer back to HOT; rd = pages still missing.  WAIT: until all are there."""


@op(0xEC, "KV_RECOMPUTE", route="absent", state=STREAM, source=_MAP)
def kv_recompute(m, kv: R1("state", both=True), tokens: R2, model: R3("state"), layer: LAYER[0, 4] = -1):
    """Fill the missing pages of a layer again by running the model over tokens, the stream's own input.

    The rows come out as the same bytes.  Errors: tokens of another length than the stream."""


@op(0xED, "KV_COMPRESS_LOSSY", route="absent", state=STREAM, source=_MAP)
def kv_compress_lossy(m, kv: R1("state", both=True), rd: Rd("int") = None, layer: LAYER[0, 4] = -1,
                      to: Enum("Q8_0 Q4_0 Q4_1")[5] = "Q8_0", recent: U32[6] = 64, budget: F32[10] = 0.0):
    """Store all but the RECENT newest rows as block type TO; rd = bytes saved.

    BUDGET > 0: per head, only while the mean relative error stays below it."""


@op(0xEE, "KV_SPARSE_MASK", route="absent", state=STREAM, source=_MAP)
def kv_sparse_mask(m, kv: R1("state", both=True), mask: R2 = None, layer: LAYER[0, 4] = -1, top_k: U32[5] = 0,
                   sink: U16[9] = 0, window: U32[11] = 0):
    """Let attention see only the rows of a BOOL mask [rows], or the first SINK, the last WINDOW and the TOP_K rows that
    got most attention weight.  No mask and no options: all rows again."""


@op(0xEF, "KV_MIGRATE_REMOTE", route="absent", state=WHERE, source=_MAP)
def kv_migrate_remote(m, kv: R1("state", both=True), rd: Rd("int") = None, node: IntOrReg(fmt="i")[0, 4] = 0,
                      layer: LAYER[5, 9] = -1, wal: PayloadFlag(0)[10] = True):
    """Move a stream's pages to NODE; rd = status (0 done, 1 deadline passed, 2 no such node, 3 refused)."""
