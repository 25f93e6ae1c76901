"""An opcode of one's own: written in Python, used from assembly, rolled back like everything else.

MEDIAN keeps a window of what it has seen; the window is the extension's state, so ABORT puts it back too.
"""
import numpy as np

import m3jit


@m3jit.extension(name="MEDIAN", number=200, state=True)
def median(window, x, *, keep: int = 5):
    """rd = the median of the last KEEP values seen."""
    window = np.append(np.zeros(0) if window is None else window, x)[-keep:]
    return float(np.median(window)), window


SOURCE = """
    LOADI rLow, 1.0
    LOADI rHigh, 100.0
    MEDIAN rM, rLow, KEEP=3
    MEDIAN rM, rLow, KEEP=3
    FORK rBefore
    MEDIAN rM, rHigh, KEEP=3
    MEDIAN rM, rHigh, KEEP=3
    STREAM rM LINE              ; 100.0: the window is 1, 100, 100
    ABORT rBefore
    MEDIAN rM, rHigh, KEEP=3
    STREAM rM LINE              ; 1.0: the window went back to 1, 1 and is now 1, 1, 100
    HALT
"""

m3jit.VM(m3jit.assemble(SOURCE, "extension.m3asm")).run()
