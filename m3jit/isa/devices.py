"""Accelerators, DMA, atomics and waiting (0x90-0x99), affinity (0xA4), and placement on local devices (0xB7-0xBF)."""
from m3jit.isa.fields import (I64, R1, R2, R3, U16, U32, U64, Enum, Flag, IntOrReg, PayloadFlag, Rd, RegList,
                              Text)
from m3jit.isa.table import OUTSIDE, StateDoc, op

DEVICE = StateDoc("device memory (region 0xE) and launches in flight, outside the context root", "not captured",
                  "not rolled back; a rollback first waits for what is in flight")
SHARED = StateDoc("a word of addressed memory; SHARED (0x6) is outside the root, ARENA and ACTIVATION are in it",
                  "O(1): copy on write of the block; SHARED is not captured", "put back, except in SHARED")
PLACED = StateDoc("where a value lives, outside the context root; the value itself is in it", "not captured",
                  "not rolled back: placement never changes a value")
REGISTRY = StateDoc("the device registry in GLOBAL (region 0x1), read only", "nothing to capture", "nothing to restore")
TRANSFERS = "HOST_TO_DEVICE DEVICE_TO_HOST DEVICE_TO_DEVICE HOST_TO_HOST"
ORDERS = "RELAXED ACQUIRE RELEASE ACQ_REL SEQ_CST"
_MAP = "device instructions of the M3-AVM map"


@op(0x90, "GPU_LAUNCH", route="absent", state=DEVICE, source=_MAP, positional=("kernel",))
def gpu_launch(m, rd: Rd("event"), kernel: Text[0], args: RegList(count=10)[8] = (), grid: U32[19] = 1,
               block: U16[23] = 1, device: IntOrReg(fmt="h")[25, 27] = -1):
    """rd = an event that is set when kernel NAME has run over GRID blocks of BLOCK threads with ARGS.

    DEVICE=-1: the context's device.  Errors: an unknown kernel; a grid or block of 0 or beyond the device's limits."""


@op(0x91, "GPU_WAIT", route="absent", state=DEVICE, source=_MAP)
def gpu_wait(m, event: R1("event"), rd: Rd("int") = None, timeout: I64[0] = -1):
    """Wait for the event; rd = 0 done, 1 when TIMEOUT ns passed (-1: none), 2 the launch failed."""


@op(0x92, "NIC_SEND", route="absent", state=DEVICE, source=_MAP)
def nic_send(m, address: R1("int"), rd: Rd("event") = None, len: IntOrReg(fmt="q")[0, 8] = 0, peer: U32[9] = 0,
             queue: U16[13] = 0):
    """Send LEN bytes at an address of CLUSTER_STAGING to PEER without copying; rd = an event.

    The bytes must not be written before the event is set.  Errors: an address outside the region."""


@op(0x93, "NIC_RECV", route="absent", state=DEVICE, source=_MAP)
def nic_recv(m, address: R1("int"), rd: Rd("int"), len: IntOrReg(fmt="q")[0, 8] = 0, queue: U16[9] = 0,
             timeout: I64[11] = -1):
    """Receive up to LEN bytes at an address of CLUSTER_STAGING; rd = bytes received, -1 after TIMEOUT ns."""


@op(0x94, "DMA_START", route="absent", state=DEVICE, source=_MAP)
def dma_start(m, rd: Rd("event"), dst: R1("int"), src: R2("int"), len: IntOrReg(fmt="q")[0, 8] = 0,
              direction: Enum(TRANSFERS)[9] = "HOST_TO_DEVICE"):
    """Copy LEN bytes from address src to address dst in the background; rd = an event.

    Errors: ranges outside their regions, or that overlap; a read-only target."""


@op(0x95, "DMA_WAIT", route="absent", state=DEVICE, source=_MAP)
def dma_wait(m, event: R1("event"), rd: Rd("int") = None, timeout: I64[0] = -1):
    """Wait for a copy; rd = 0 done, 1 when TIMEOUT ns passed, 2 it failed.  Afterwards its bytes are visible."""


def _atomic(code: int, name: str, formula: str, body) -> None:
    body.__doc__ = (f"""rd = the old word at the address; the word becomes {formula}, in one indivisible step.

    64-bit integers; addition wraps.  ORDER says which other accesses may be seen in another order.  Traps: an address
    that is not a multiple of 8, outside its region or read only.""")
    op(code, name, route="absent", state=SHARED, reads=("memory",), writes=("memory",), source=_MAP)(body)


# The signatures are all there is of them: the opcodes are route "absent" and refused by name when they are reached.
def _cas(m, rd: Rd("int"), address: R1("int"), expected: R2("int"), value: R3("int"),
         order: Enum(ORDERS)[0] = "SEQ_CST"):
    pass


def _add(m, rd: Rd("int"), address: R1("int"), value: R2("int"), order: Enum(ORDERS)[0] = "SEQ_CST"):
    pass


def _xchg(m, rd: Rd("int"), address: R1("int"), value: R2("int"), order: Enum(ORDERS)[0] = "SEQ_CST"):
    pass


_atomic(0x96, "ATOMIC_CAS", "value if it was expected", _cas)
_atomic(0x97, "ATOMIC_ADD", "word + value", _add)
_atomic(0x98, "ATOMIC_XCHG", "value", _xchg)


@op(0x99, "WFI", route="machine", why_slow="waits for the outside", reads=("input",), writes=("scheduler",),
    state=OUTSIDE)
def wfi(m, rd: Rd("int") = None, timeout: I64[0] = -1):
    """Sleep until an interrupt is pending for this context: rd = 1; or until USER_INPUT has an item it has not read:
    rd = 2; or until TIMEOUT ns have passed (-1: without end): rd = 0.

    The interrupt stays pending for IF_INTERRUPT.  The machine runs its other contexts meanwhile."""
    return m.wait_for_interrupt(timeout)


@op(0xA4, "SET_AFFINITY", route="absent", state=OUTSIDE, source=_MAP)
def set_affinity(m, ctx: R1("context") = None, mask: IntOrReg(fmt="Q")[0, 8] = 2 ** 64 - 1, numa: U64[9] = 2 ** 64 - 1):
    """Let a context (absent: this one) run on the CPUs of MASK and the NUMA nodes of NUMA only; results never change.

    Errors: a mask without a CPU of this machine."""


# -- placement ----------------------------------------------------------------------------------------------------

KINDS = Enum("ANY CPU GPU NPU TPU FPGA PHOTONIC NEUROMORPHIC QUANTUM")


@op(0xB7, "DEVICE_QUERY", route="absent", state=REGISTRY, source=_MAP)
def device_query(m, rd: Rd("int"), device: R1("int") = None, kind: KINDS[0] = "ANY", capabilities: U32[1] = 0,
                 min_mem_mb: U32[5] = 0, min_bandwidth_mbps: U32[9] = 0, numa: U64[13] = 2 ** 64 - 1,
                 exclude: U64[21] = 0):
    """rd = number of the first device that fits, or -1; a device given: 1 if that one fits, else 0.

    CAPABILITIES: bits TENSOR_CORE FP8 INT4 INT8 BF16 FP16 FP32 FP64 UNIFIED_MEM MIG RDMA NVLINK P2P ATOMIC ECC
    SPARSE."""


@op(0xB8, "DEVICE_SELECT", route="absent", state=OUTSIDE, source=_MAP)
def device_select(m, device: R1("int") = None, rd: Rd("int") = None, mask: U64[0] = 2 ** 64 - 1,
                  numa: U64[8] = 2 ** 64 - 1,
                  min_mem_mb: U32[16] = 0, capabilities: U32[20] = 0):
    """Run this context's kernels on the device, or on the best of MASK; rd = 0 done, 1 unavailable, 2 not allowed.

    Sets SP8 and SP9.  Results are the same bytes on every device."""


@op(0xB9, "DEVICE_HEALTH", route="absent", state=OUTSIDE, source=_MAP, shape="[6] or [devices, 6]")
def device_health(m, rd: Rd, device: R1("int") = None):
    """rd = I64 temperature (m°C), power (mW), utilisation (%), memory used (MB), ECC errors, throttling (%).

    Absent device: a row for each.  -1 where the device does not tell.  Updates SP10."""


@op(0xBA, "PLACE", route="absent", state=PLACED, source=_MAP)
def place(m, x: R1, rd: Rd("int") = None, require: PayloadFlag(0)[0] = False, mask: U64[1] = 2 ** 64 - 1,
          numa: U64[9] = 2 ** 64 - 1, min_bandwidth_mbps: U32[17] = 0, min_mem_mb: U32[21] = 0):
    """Move a value to a device of MASK; rd = 0 placed, 1 placed elsewhere, 2 failed.  REQUIRE: trap instead of 1 or
    2."""


@op(0xBB, "SHARD", route="absent", state=PLACED, source=_MAP)
def shard(m, rd: Rd("state"), x: R1, axis: IntOrReg(fmt="b")[0, 1] = -1, n: U16[2] = 0, mask: U64[4] = 2 ** 64 - 1,
          by: Enum("TENSOR PIPELINE EXPERT")[12] = "TENSOR", devices: RegList(count=8)[13] = ()):
    """rd = a handle of x split along AXIS (-1: chosen) into N parts (0: one for each device) on the devices of MASK.

    TENSOR splits a matrix, PIPELINE a bundle by layers, EXPERT a mixture by experts.  Arithmetic keeps its order, so
    results do not change.  Errors: an axis shorter than N."""


@op(0xBC, "REPLICATE", route="absent", state=PLACED, source=_MAP)
def replicate(m, rd: Rd("state"), x: R1, n: U16[0] = 0, mask: U64[2] = 2 ** 64 - 1,
              asynchronous: PayloadFlag(0)[10] = False,
              verify: PayloadFlag(1)[10] = False):
    """rd = a handle of N copies (0: one for each device of MASK).  VERIFY: compare the copies' hashes; a trap if they
    differ."""


@op(0xBD, "REDUCE_LOCAL", route="absent", state=PLACED, source=_MAP)
def reduce_local(m, rd: Rd, x: R1("state", "tensor"),
                 op: Enum("SUM MEAN MAX MIN ALLGATHER REDUCE_SCATTER ALL_TO_ALL BROADCAST")[0] = "SUM",
                 mask: U64[1] = 2 ** 64 - 1, transport: Enum("AUTO NVLINK PCIE RDMA")[9] = "AUTO", timeout: U64[10] = 0,
                 asynchronous: PayloadFlag(0)[18] = False, inplace: Flag(3) = False):
    """rd = OP over the parts of a sharded or replicated value, in order of device number, whatever the transport."""


@op(0xBE, "MIGRATE_LOCAL", route="absent", state=PLACED, source=_MAP)
def migrate_local(m, x: R1, device: R2("int"), rd: Rd("int") = None, offset: U64[0] = 0, len: U64[8] = 0,
                  asynchronous: PayloadFlag(0)[16] = False, verify: PayloadFlag(1)[16] = False):
    """Move bytes [OFFSET, OFFSET + LEN) of a value to a device (LEN 0: all); rd = 0 done, 1 already there, 2 failed."""


@op(0xBF, "BARRIER_LOCAL", route="absent", state=OUTSIDE, source=_MAP)
def barrier_local(m, rd: Rd("int") = None, id: U32[0] = 0, expect: U32[4] = 1, timeout: U64[8] = 0,
                  mode: Enum("SYNC NOTIFY")[16] = "SYNC", mask: U64[17] = 2 ** 64 - 1):
    """Wait until EXPECT contexts of the devices of MASK arrived at barrier ID; rd = 0, or 1 when TIMEOUT ns passed.

    NOTIFY does not wait: it arrives and sets the interrupt when the barrier opens."""
