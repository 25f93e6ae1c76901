"""OpenCL backend, first slice: single kernels (elementwise chains, reductions, quantised matrix products).

A device without denormals, infinities and NaNs, fused multiply-add or correctly rounded division and square root is
refused by name: its results could differ.  Kernels that follow pointers stored in memory (key/value page tables) need
device addresses and are refused before launch.
"""
from __future__ import annotations

from typing import Any, Callable

import numpy as np

from m3jit.backends.opencl.render import render_opencl
from m3jit.errors import UserError
from m3jit.ir.loop import Kernel, walk


def devices() -> list[Any]:
    """Every OpenCL device; empty (never an exception) when there is no driver."""
    try:
        import pyopencl as cl
        return [d for p in cl.get_platforms() for d in p.get_devices()]
    except Exception:
        return []


def device_refusal(device: Any) -> str | None:
    """Why a device cannot give the contract's bytes, or None."""
    import pyopencl as cl
    config = device.single_fp_config
    need = {"denormals": cl.device_fp_config.DENORM, "infinities and NaNs": cl.device_fp_config.INF_NAN,
            "fused multiply-add": cl.device_fp_config.FMA, "round to nearest": cl.device_fp_config.ROUND_TO_NEAREST,
            "correctly rounded division and square root": cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT}
    missing = [name for name, bit in need.items() if not config & bit]
    return f"{device.name.strip()}: no {', no '.join(missing)} in single precision" if missing else None


def compiler_refusal(device: Any) -> str | None:
    """Why a device's own compiler does not work at all, or None (PoCL before 4 does not know CPUs newer than its
    LLVM: "unknown target CPU 'generic'")."""
    import pyopencl as cl
    try:
        cl.Program(cl.Context([device]), "__kernel void probe(__global int *x) { x[0] = 1; }").build(cache_dir=False)
    except Exception as e:
        lines = [line for line in str(e).splitlines() if "error" in line]
        return f"{device.name.strip()} ({device.platform.version.strip()}): its compiler fails: {(lines or [e])[0]}"
    return None


class OpenCLEngine:
    """engine.kernel(kernel)(args): NumPy arrays are copied to the device and, where written, back."""

    def __init__(self, name: str = ""):
        found = devices()
        if not found:
            raise UserError("no OpenCL device: install a driver (for the CPU: pip install 'pyopencl[pocl]') and look at "
                            "`m3jit doctor`")
        chosen = [d for d in found if name.lower() in f"{d.platform.name} {d.name}".lower()]
        if not chosen:
            raise UserError(f"no OpenCL device named {name!r}; there are: {', '.join(d.name.strip() for d in found)}")
        reasons = [device_refusal(d) or compiler_refusal(d) for d in chosen]
        good = [d for d, why in zip(chosen, reasons) if why is None]
        if not good:
            raise UserError("OpenCL devices refused: " + "; ".join(r for r in reasons if r))
        import pyopencl as cl
        self.cl, self.device = cl, good[0]
        self.context = cl.Context([self.device])
        self.queue = cl.CommandQueue(self.context)
        self.built: dict[str, Any] = {}
        self.launches: dict[str, int] = {}
        self.groups: dict[str, int] = {}              # kernel name -> work-groups of the last launch

    def refusal(self, kernel: Kernel) -> str | None:
        """Why this kernel cannot run here, or None."""
        if any(v.op in ("load", "load_lanes") and v.attrs["dtype"] == "i64" and
               any(p.name == "table" for p in kernel.params) for v in walk(kernel.body)):
            return f"{kernel.name} follows addresses stored in memory; OpenCL buffers have none (use the CPU backend)"
        uses_f64 = any(v.type == "f64" for v in walk(kernel.body))
        if uses_f64 and "cl_khr_fp64" not in self.device.extensions:
            return f"{kernel.name} computes in f64, {self.device.name.strip()} has no cl_khr_fp64"
        return None

    def supports(self, kernel: Kernel) -> bool:
        return self.refusal(kernel) is None

    def source(self, kernel: Kernel) -> str:
        return render_opencl(kernel)

    def kernel(self, kernel: Kernel) -> Callable:
        why = self.refusal(kernel)
        if why:
            raise UserError(why)
        digest = kernel.digest()
        if digest not in self.built:
            program = self.cl.Program(self.context, render_opencl(kernel)).build(cache_dir=False)
            self.built[digest] = self.cl.Kernel(program, kernel.name)
        built = self.built[digest]

        def call(args: list[Any], nthreads: int = 1) -> None:
            self._launch(built, kernel, args)
        return call

    def _launch(self, built: Any, kernel: Kernel, args: list[Any]) -> None:
        cl, flags = self.cl, self.cl.mem_flags
        values: list[Any] = []
        back = []
        for p, a in zip(kernel.params, args):
            if p.kind == "ptr":
                host = np.ascontiguousarray(a)
                buffer = cl.Buffer(self.context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=host) \
                    if host.nbytes else cl.Buffer(self.context, flags.READ_WRITE, 16)
                values += [buffer, np.int64(0)]
                if "w" in p.access and host.nbytes:
                    back.append((a, buffer))
            else:
                values.append({"i64": np.int64, "i32": np.int32, "f32": np.float32, "f64": np.float64}[p.kind](a))
        groups = grid_of(kernel, args)
        self.launches[kernel.name] = self.launches.get(kernel.name, 0) + 1
        self.groups[kernel.name] = groups
        if groups:
            built(self.queue, (groups * kernel.lanes,), (kernel.lanes,), *values)
        for a, buffer in back:
            cl.enqueue_copy(self.queue, a, buffer)
        self.queue.finish()


def grid_of(kernel: Kernel, args: list[Any]) -> int:
    """Number of groups: the prologue evaluated on the host."""
    from m3jit.backends.python import runtime_plain
    from m3jit.backends.python.render import render_grid
    namespace = dict(vars(runtime_plain))
    exec(render_grid(kernel), namespace)
    return int(namespace["grid"](*[a if p.kind != "ptr" else 0 for p, a in zip(kernel.params, args)]))
