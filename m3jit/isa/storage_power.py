"""Storage tiers of weights (0xC0-0xC7), power and temperature (0xC8-0xCF).  None of them changes a result."""
from m3jit.isa.fields import F32, R1, U16, U32, Enum, IntOrReg, PayloadFlag, Rd
from m3jit.isa.table import OUTSIDE, StateDoc, op

TIERED = StateDoc("which tier holds a value (regions 0x10-0x12), outside the context root; the value is in it",
                  "not captured", "not rolled back: a tier never changes a value")
TIERS = "HOT WARM COLD REMOTE OBJECT"
ONE = Enum(TIERS)
_STORAGE = "storage tiers of the M3-AVM map"
_POWER = "power and thermal instructions of the M3-AVM map"


@op(0xC0, "PIN", route="absent", state=TIERED, source=_STORAGE)
def pin(m, x: R1("tensor", "state"), rd: Rd("int") = None, tier: ONE[0] = "HOT", first: U16[1] = 0,
        last: U16[3] = 65535):
    """Keep a value, or layers FIRST..LAST of a model, in TIER until UNPIN; rd = bytes pinned.

    HOT device memory, WARM main memory, COLD local disk, REMOTE another machine's, OBJECT an object store.
    Errors: the tier has no room left."""


@op(0xC1, "UNPIN", route="absent", state=TIERED, source=_STORAGE)
def unpin(m, x: R1("tensor", "state"), rd: Rd("int") = None, first: U16[0] = 0, last: U16[2] = 65535):
    """Undo PIN; rd = bytes released.  What was not pinned is no error."""


@op(0xC2, "PREFETCH_TIER", route="absent", state=TIERED, source=_STORAGE)
def prefetch_tier(m, x: R1("tensor", "state"), tier: ONE[0] = "WARM", first: U16[1] = 0, last: U16[3] = 65535):
    """Start to bring a value, or layers of a model, into TIER; does not wait."""


@op(0xC3, "STREAM_WEIGHTS", route="absent", state=TIERED, source=_STORAGE)
def stream_weights(m, model: R1("state"), ahead: U16[0] = 1, keep_first: U16[2] = 0, keep_last: U16[4] = 0):
    """Stream a model's layers in order of use, AHEAD layers early; layers KEEP_FIRST..KEEP_LAST - 1 stay in HOT."""


@op(0xC4, "EVICT", route="absent", state=TIERED, source=_STORAGE)
def evict(m, x: R1("tensor", "state"), rd: Rd("int") = None, tier: ONE[0] = "HOT", first: U16[1] = 0,
          last: U16[3] = 65535):
    """Drop the copies in TIER and above it; rd = bytes freed.  Pinned values and the last copy stay."""


@op(0xC5, "TIER_QUERY", route="absent", state=TIERED, source=_STORAGE, shape="[4]")
def tier_query(m, rd: Rd, x: R1("tensor", "state") = None, tier: ONE[0] = "HOT"):
    """rd = I64 bytes held in TIER, bytes free, hits, misses; of one value, or of all."""


@op(0xC6, "TIER_POLICY", route="absent", state=TIERED, source=_STORAGE)
def tier_policy(m, x: R1("tensor", "state") = None, policy: Enum("LRU LFU PIN_FIRST STREAMING")[0] = "LRU",
                tier: ONE[1] = "HOT"):
    """How TIER chooses what to drop, for one value or for all."""


@op(0xC7, "WEIGHTS_HINT", route="absent", state=TIERED, source=_STORAGE, key_aliases={"ACCESS_PATTERN": "access"})
def weights_hint(m, x: R1("tensor", "state"), access: Enum("SEQUENTIAL RANDOM ONCE REPEATED")[0] = "SEQUENTIAL"):
    """Say how a value will be read, so that reading ahead fits."""


@op(0xC8, "POWER_QUERY", route="absent", state=OUTSIDE, source=_POWER, shape="[3]")
def power_query(m, rd: Rd, device: R1("int") = None):
    """rd = I64 power (mW), temperature (m°C), throttling (%) of a device, or the sum, maximum and maximum of all.

    -1 where nothing is measured."""


@op(0xC9, "POWER_BUDGET_SET", route="absent", state=OUTSIDE, source=_POWER)
def power_budget_set(m, ctx: R1("context") = None, budget_mw: IntOrReg(fmt="q")[0, 8] = 0):
    """Limit a context (absent: this one) to BUDGET_MW on average over a second; 0: no limit.  Sets SP12.

    Over its budget it waits; its results do not change."""


@op(0xCA, "POWER_BUDGET_GET", route="absent", state=OUTSIDE, source=_POWER)
def power_budget_get(m, rd: Rd("int"), ctx: R1("context") = None):
    """rd = the context's budget in mW, 0 for none."""


@op(0xCB, "THERMAL_QUERY", route="absent", state=OUTSIDE, source=_POWER, shape="[devices]")
def thermal_query(m, rd: Rd, device: R1("int") = None):
    """rd = I64 temperature in m°C, of one device or of all; -1 where nothing is measured."""


@op(0xCC, "THROTTLE_POLICY", route="absent", state=OUTSIDE, source=_POWER)
def throttle_policy(m, policy: Enum("NONE DROP_GREEN RELAX MOVE")[0] = "DROP_GREEN", limit_mc: U32[1] = 80000,
                    hysteresis_mc: U32[5] = 5000, factor: F32[9] = 2.0):
    """What happens above LIMIT_MC until LIMIT_MC - HYSTERESIS_MC: GREEN contexts wait, deadlines are relaxed by FACTOR,
    or work moves to a cooler device.  RED contexts always run."""


@op(0xCD, "POWER_CAP", route="absent", state=OUTSIDE, source=_POWER)
def power_cap(m, device: R1("int"), rd: Rd("int") = None, cap_mw: IntOrReg(fmt="q")[0, 8] = 0):
    """Cap a device's power in hardware; 0: its default.  rd = the cap in force.  Errors: not permitted."""


@op(0xCE, "ENERGY_ACCOUNT", route="absent", state=OUTSIDE, source=_POWER)
def energy_account(m, rd: Rd("int"), ctx: R1("context") = None, reset: PayloadFlag(0)[0] = False):
    """rd = energy in mJ the context has used since its start or the last RESET; -1 when nothing is measured."""


@op(0xCF, "THERMAL_HEADROOM", route="absent", state=OUTSIDE, source=_POWER)
def thermal_headroom(m, rd: Rd("int"), device: R1("int") = None):
    """rd = m°C left before the device (absent: the hottest) throttles; -1 when unknown.  Sets SP13."""
