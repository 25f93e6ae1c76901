"""OpenCL backend, first slice: single kernels (elementwise chains, reductions, quantised matrix products).

A device without denormals, infinities and NaNs, fused multiply-add or correctly rounded division and square root is
refused by name: its results could differ.  An argument that is an address (the base of key/value pages) is refused
before launch: OpenCL buffers have none.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Callable

import numpy as np

from m3jit.backends.group_memory import group_memory_bytes, uses_type
from m3jit.backends.opencl.render import render_opencl, symbol
from m3jit.errors import InternalError, UserError, needs_library
from m3jit.ir.loop import Kernel
from m3jit.ir.loop_text import print_kernel

BUILD_OPTIONS = ["-cl-std=CL1.2", "-w"]            # no option that loosens arithmetic; -w: no warnings


def devices() -> list[Any]:
    """Every OpenCL device; empty (never an exception) when there is no driver."""
    try:
        import pyopencl as cl
        return [d for p in cl.get_platforms() for d in p.get_devices()]
    except Exception:
        return []


def _missing(config: int) -> list[str]:
    """What a floating-point configuration lacks of what the contract needs."""
    import pyopencl as cl
    need = {"denormals": cl.device_fp_config.DENORM, "infinities and NaNs": cl.device_fp_config.INF_NAN,
            "fused multiply-add": cl.device_fp_config.FMA, "round to nearest": cl.device_fp_config.ROUND_TO_NEAREST}
    return [name for name, bit in need.items() if not config & bit]


def device_refusal(device: Any) -> str | None:
    """Why a device cannot give the contract's bytes, or None."""
    import pyopencl as cl
    missing = _missing(device.single_fp_config)
    if not device.single_fp_config & cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT:
        missing.append("correctly rounded division and square root")
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
    """engine.kernel(kernel)(args): NumPy arrays are copied to the device and, where written, back.

    UnsupportedError: pyopencl is not installed; UserError: there is no device, or none that gives the bytes."""

    def __init__(self, name: str = ""):
        needs_library("pyopencl", "opencl", "the OpenCL backend")
        found = devices()
        if not found:
            raise UserError(
                "no OpenCL device: install a driver (for the CPU: pip install 'pyopencl[pocl]') and look at "
                "`m3jit doctor`"
            )
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
        name = self.device.name.strip()
        if uses_type(kernel, "f64"):
            missing = _missing(self.device.double_fp_config) if "cl_khr_fp64" in self.device.extensions else ["f64"]
            if missing:
                return (
                    f"{kernel.name} computes in f64, {name} has no {', no '.join(missing)} there (use the CPU backend)"
                )
        need, have = group_memory_bytes(kernel), self.device.local_mem_size
        if need > have:
            return f"{kernel.name} needs {need} bytes of local memory, {name} has {have} (use the CPU backend)"
        if kernel.lanes > self.device.max_work_group_size:
            most = self.device.max_work_group_size
            return f"{kernel.name} has {kernel.lanes} lanes, a work-group of {name} holds {most} (use the CPU backend)"
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
            self.built[digest] = self._build(kernel)
        built = self.built[digest]

        def call(args: list[Any], nthreads: int = 1) -> None:
            self._launch(built, kernel, args)
        return call

    def _build(self, kernel: Kernel) -> Any:
        source = render_opencl(kernel)
        try:
            program = self.cl.Program(self.context, source).build(BUILD_OPTIONS, cache_dir=False)
        except self.cl.Error as e:
            path = Path(tempfile.mkdtemp(prefix="m3jit-opencl-")) / f"{kernel.name}.cl"
            path.write_text(f"// {self.device.platform.version} on {self.device.name}\n{source}\n"
                            f"/*\n{print_kernel(kernel)}*/\n")
            raise InternalError(
                f"{self.device.name.strip()}'s compiler rejects kernel {kernel.name}, which is a mistake in "
                f"m3jit; the source and the loop IR are in {path}: {e}"
            ) from e
        return self.cl.Kernel(program, symbol(kernel.name))

    def _launch(self, built: Any, kernel: Kernel, args: list[Any]) -> None:
        cl, flags = self.cl, self.cl.mem_flags
        values: list[Any] = []
        back = []
        for p, a in zip(kernel.params, args):
            if p.kind == "ptr":
                if not isinstance(a, np.ndarray):
                    raise UserError(
                        f"kernel {kernel.name}: argument {p.name} is an address ({a!r}); OpenCL buffers have none, "
                        "an array is needed (use the CPU backend)"
                    )
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
    names = dict(runtime_plain.namespace(kernel.lanes))
    exec(render_grid(kernel), names)
    return int(names["grid"](*[a if p.kind != "ptr" else 0 for p, a in zip(kernel.params, args)]))
