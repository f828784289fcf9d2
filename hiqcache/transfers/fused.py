"""The fused transfer: one Triton kernel gathers, encodes and stores; another does the reverse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import triton
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from hiqcache.codecs.base import DTYPES, Codec
from hiqcache.codecs.int8 import SCALE_MIN
from hiqcache.codecs.int8_rot import hadamard, signs
from hiqcache.transfers import kernels
from hiqcache.transfers.base import Arena, Transfer
from hiqcache.transfers.indices import IndexSender


class Launch(NamedTuple):
    """How wide a kernel runs: ``elements`` a tile, ``programs`` in the grid, ``warps`` of each.

    ``stages`` is Triton's num_stages of the kernel's inner loop. A tile is decoded while the
    records of ``stages`` - 2 more are under way, or encoded while the rows of so many are; with
    int8-rot of half as many. With one stage, none are.
    """

    elements: int
    programs: int
    warps: int
    stages: int = 1


# Chosen on an H200 with 2,048 tokens of Qwen3-8B (loadtest/sweep_launches.py, whose figures are in
# results/h200/launches.md). A backup's writes wait for no answer: a kernel that encodes faster than
# PCIe takes them fills the queues that the other multiprocessors' loads pass too, and a decode step
# beside it can take twice as long. So a backup has what it takes to come near PCIe's speed and
# no more: rows of int8 are loaded as they are needed, by four warps. In layer_first, records are in
# smaller pieces, and random slots want more programs. Restore: few programs, with several tiles
# each on their way; more are no faster, and a decode step beside them loses more. int8-rot's take
# longer to decode one.
BACKUP = {
    ("int8", "page_first"): Launch(8192, 8, 4),
    ("int8", "layer_first"): Launch(8192, 12, 4),
    ("int8-rot", "page_first"): Launch(8192, 8, 4, 5),
    ("int8-rot", "layer_first"): Launch(8192, 16, 8),
}
RESTORE = {"int8": Launch(8192, 6, 8, 5), "int8-rot": Launch(8192, 12, 4, 5)}

#: Tokens times layers of a restore's launch, at most, where it has more than one layer: some 90 us
#: of Qwen3-8B's on an H200. A layer waits for the others of its launch. With twice as many,
#: 2,048 tokens take a little less time, and a GEMM beside them much more (launches.md).
LAUNCH_TOKENS = 2048

#: The widest access of a GPU thread, in bytes.
VECTOR_BYTES = 16

#: The oldest compute capability that has the kernels' instructions.
CAPABILITY = (8, 0)

#: The smallest side of a tile that Triton's dot takes.
DOT_ROWS = 16


@dataclass
class _Restore:
    """A restore that has more layers to come: who asks, and what is enqueued."""

    host: torch.Tensor
    device: torch.Tensor
    #: The stream's handle; None on the CPU.
    stream: int | None
    #: The layer asked for last; the first that no launch has served; layers of the last launch.
    asked: int
    served: int
    group: int = 0

    def is_asked_for(
        self,
        layer: int,
        host: torch.Tensor,
        device: torch.Tensor,
        stream: int | None,
    ) -> bool:
        """Whether this call is the next of the same restore."""
        same = host is self.host and device is self.device and stream == self.stream
        return same and layer == self.asked + 1


class FusedTransfer(Transfer):
    """Reads and writes pinned host memory from the kernels; holds no staging memory.

    Serves codecs int8 and int8-rot, any number of heads, a head_dim that is a multiple of 16,
    packed or padded records in any layout, and device buffers that have one slot stride. One launch
    for a backup, one a layer for a long restore. The launches of a short one would take longer than
    its bytes, so a launch serves more and more layers there, some before they are asked for
    (LAUNCH_TOKENS). The kernels are compiled here, so that no transfer waits for a compiler.

    Indices on the CPU are sent through pinned memory; the layers of a restore share one copy.
    Indices on the device must live until the stream has passed (SGLang records its index tensors
    on the transfer stream), as must the arena and the device buffers.

    A restore is known by its index tensors: the layers of one are asked for in their order, on one
    stream, with the same two tensors, whose contents don't change meanwhile; nor do its host slots,
    and nothing else uses its device rows. SGLang does all of this. Layers asked for in any other
    way are restored one by one.

    Not thread-safe: one thread issues a pool's transfers, as SGLang's scheduler does.

    ``backup``, ``restore`` and ``launch_tokens`` are for measurements; the defaults serve.

    Raises ValueError where the pool or the codec can't be served.
    """

    name: ClassVar[str] = "fused"

    def __init__(
        self,
        codec: Codec,
        arena: Arena,
        device_k: Sequence[torch.Tensor],
        device_v: Sequence[torch.Tensor],
        backup: Launch | None = None,
        restore: Launch | None = None,
        launch_tokens: int = LAUNCH_TOKENS,
    ) -> None:
        super().__init__(codec, arena, device_k, device_v)
        rows = self.device_k[0]
        self._device, self._dtype = rows.device, rows.dtype
        self._planes = arena.planes
        self._heads, self._dim = rows.shape[1:]
        self._device_stride = rows.stride(0) * rows.element_size()
        self._check()
        backup = backup or BACKUP[codec.name, arena.layout.order]
        restore = restore or RESTORE[codec.name]
        bases = self._buffer_bases()
        self._bases = bases.to(self._device)
        encode, decode = self._rotation()
        self._indices = IndexSender(self._device)
        self._restoring: _Restore | None = None
        self._launch_tokens = launch_tokens
        self._backup_memory, self._restore_memory = self._memory(encode), self._memory(decode)
        geometry = self._geometry(bases)
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        self._backup_launch, self._backup_constants, self._backup_kernel = self._compiled(
            kernels.backup,
            backup,
            geometry
            | {
                "LAYERS": len(self.device_k),
                # A page_first page is written whole before the next one is begun.
                "LAYER_INNER": arena.layout.order == "page_first",
                "SCALE_MIN_BITS": _bf16_bits(SCALE_MIN[self._dtype]),
            },
            self._backup_arguments(none, none),
        )
        self._restore_launch, self._restore_constants, self._restore_kernel = self._compiled(
            kernels.restore,
            restore,
            geometry | {"LARGEST": torch.finfo(self._dtype).max},
            self._restore_arguments(0, 1, none, none),
        )
        # Tokens a tile. Computed once: a restore's first launch waits for the Python before it.
        self._backup_tile = self._rows(self._backup_launch) // (2 * self._heads)
        self._restore_tile = self._rows(self._restore_launch) // (2 * self._heads)

    @property
    def launches(self) -> dict[str, Launch]:
        """How wide backup and restore run on this GPU."""
        return {"backup": self._backup_launch, "restore": self._restore_launch}

    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        tokens = host_indices.numel()
        if tokens == 0:
            return
        host = self._indices.send("backup host", host_indices)
        device = self._indices.send("backup device", device_indices)
        programs = self._backup_launch.programs
        by_tile = min(programs, -(-tokens // self._backup_tile))
        grid = by_tile, min(programs // by_tile, len(self.device_k)), 1
        self._backup_kernel[grid](*self._backup_arguments(host, device), *self._backup_constants)

    def restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        if host_indices.numel() == 0:
            return
        stream = self._stream()
        run, self._restoring = self._restoring, None
        if run is None or not run.is_asked_for(layer, host_indices, device_indices, stream):
            run = _Restore(host_indices, device_indices, stream, layer, layer)
        if layer == run.served:
            self._launch_restore(run, layer)
        run.asked = layer
        # Nothing is kept of a restore that is complete, or that has failed.
        if layer + 1 < len(self.device_k):
            self._restoring = run

    def _launch_restore(self, run: _Restore, layer: int) -> None:
        tokens = run.host.numel()
        fitting = self._launch_tokens // tokens
        group = max(min(2 * run.group, fitting, len(self.device_k) - layer), 1)
        host = self._indices.send("restore host", run.host)
        device = self._indices.send("restore device", run.device)
        programs, tiles = self._restore_launch.programs, -(-tokens // self._restore_tile)
        # All of a launch's layers at once, if the programs can be shared out evenly, and as many as
        # it takes to keep them all busy.
        at_once = max(math.gcd(group, programs), min(group, programs // tiles))
        grid = min(programs // at_once, tiles), at_once, 1
        self._restore_kernel[grid](
            *self._restore_arguments(layer, group, host, device), *self._restore_constants
        )
        run.group = group
        run.served += group

    def _stream(self) -> int | None:
        """The current stream's handle, without the object that torch would make of it."""
        if self._device.type != "cuda":
            return None
        handle: int = driver.active.get_current_stream(self._device.index)
        return handle

    def _backup_arguments(self, host: torch.Tensor, device: torch.Tensor) -> tuple[Any, ...]:
        return (*self._backup_memory, host, device, host.numel())

    def _restore_arguments(
        self, layer: int, layers: int, host: torch.Tensor, device: torch.Tensor
    ) -> tuple[Any, ...]:
        return (*self._restore_memory, host, device, host.numel(), layer, layers)

    def _memory(self, matrix: torch.Tensor) -> tuple[Any, ...]:
        planes = self._planes
        return (
            *(self.arena.buffer, self.device_k[0], self._bases, matrix),
            *(planes.k_codes.base, planes.v_codes.base, planes.k_scales.base, planes.v_scales.base),
            *(planes.k_codes.layer_stride, planes.k_scales.layer_stride),
            self._device_stride,
        )

    def _check(self) -> None:
        if self.codec.name not in RESTORE:
            raise ValueError(
                f"transfer fused serves codecs int8 and int8-rot, not {self.codec.name}: use "
                f"HIQCACHE_TRANSFER=torch."
            )
        if self._dtype not in DTYPES:
            raise ValueError(f"transfer fused serves bf16 and fp16 rows, not {self._dtype}.")
        if self._dim % VECTOR_BYTES:
            raise ValueError(
                f"transfer fused serves a head_dim that is a multiple of {VECTOR_BYTES}; this "
                f"model's is {self._dim}: use HIQCACHE_TRANSFER=torch."
            )
        shape = (self._heads, self._dim)
        strides = (self.device_k[0].stride(0), self._dim, 1)
        for rows in (*self.device_k, *self.device_v):
            if rows.shape[1:] != shape or rows.stride() != strides:
                raise ValueError(
                    f"transfer fused needs device buffers whose rows are all contiguous, "
                    f"{shape} wide and {strides[0]} elements apart; found rows "
                    f"{tuple(rows.shape[1:])} with strides {rows.stride()}: use "
                    f"HIQCACHE_TRANSFER=torch."
                )
        if self.arena.buffer.data_ptr() % VECTOR_BYTES:
            raise ValueError(
                f"transfer fused moves {VECTOR_BYTES} bytes of the arena at a time, and this "
                f"arena's buffer begins at no multiple of {VECTOR_BYTES}: allocate it at one."
            )
        if kernels.INTERPRETED:
            return
        if self._device.type != "cuda":
            raise ValueError(
                f"transfer fused runs on CUDA devices and this pool is on {self._device}: use "
                f"HIQCACHE_TRANSFER=torch."
            )
        _check_gpu(torch.cuda.get_device_capability(self._device), torch.version.hip)
        if not self.arena.buffer.is_pinned():
            raise ValueError(
                "transfer fused lets the GPU read and write the arena, so its memory must be "
                "pinned (cudaHostRegister or pin_memory=True), and this arena's is not."
            )

    def _buffer_bases(self) -> torch.Tensor:
        """The kernels' bases, int64 ``[layers, 2]``."""
        first = self.device_k[0]
        return torch.tensor(
            [
                [rows.data_ptr() - first.data_ptr() for rows in layer]
                for layer in zip(self.device_k, self.device_v, strict=True)
            ],
            dtype=torch.int64,
        )

    def _geometry(self, bases: torch.Tensor) -> dict[str, Any]:
        """What both kernels are compiled for; nothing in it depends on the number of pages."""
        planes = self._planes
        codes, scales = planes.k_codes, planes.k_scales
        return {
            "HEADS": self._heads,
            "DIM": self._dim,
            "DIM_BLOCK": triton.next_power_of_2(self._dim),
            "PAGE_SIZE": self.arena.layout.page_size,
            "CODE_PAGE_STRIDE": codes.page_stride,
            "CODE_SLOT_STRIDE": codes.slot_stride,
            "SCALE_PAGE_STRIDE": scales.page_stride,
            "SCALE_SLOT_STRIDE": scales.slot_stride,
            "DEVICE_ALIGN": math.gcd(VECTOR_BYTES, self._device_stride, *bases.flatten().tolist()),
            "CODE_ALIGN": math.gcd(
                *(VECTOR_BYTES, codes.page_stride, codes.slot_stride, codes.layer_stride),
                *(codes.base, planes.v_codes.base),
            ),
            "ROTATE": self.codec.name == "int8-rot",
        }

    def _compiled(
        self, kernel: Any, launch: Launch, values: dict[str, Any], arguments: tuple[Any, ...]
    ) -> tuple[Launch, tuple[Any, ...], Any]:
        """The launch, the constants in the order of the kernel's parameters, what launches it.

        Where shared memory is too small for all stages, the launch has fewer of them.
        """
        while True:
            given = values | {"ROWS": self._rows(launch), "STAGES": launch.stages}
            constants = tuple(given[name] for name in kernel.arg_names if name in given)
            try:
                return launch, constants, _compile(kernel, launch, (*arguments, *constants))
            except OutOfResources as error:
                if launch.stages == 1:
                    raise ValueError(
                        f"transfer fused can't serve this model on this GPU, whose multiprocessors "
                        f"are too small for a token of its rows ({error}): use "
                        f"HIQCACHE_TRANSFER=torch."
                    ) from error
                launch = launch._replace(stages=launch.stages - 1)

    def _rows(self, launch: Launch) -> int:
        """Head rows of a tile: whole tokens."""
        rows: int = launch.elements // triton.next_power_of_2(self._dim)
        token: int = triton.next_power_of_2(2 * self._heads)
        return max(rows, token, DOT_ROWS)

    def _rotation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int8-rot's matrices for both directions, in a type that holds them exactly."""
        if self.codec.name != "int8-rot":
            return self._bases, self._bases  # the kernels don't read it
        flips = torch.tensor(signs(self._dim), dtype=torch.float32)
        matrix = hadamard(torch.eye(self._dim))
        # The interpreter's dot knows no bf16.
        dtype = torch.float32 if kernels.INTERPRETED else self._dtype
        encode = matrix * flips[:, None] / self._dim
        decode = matrix * flips[None, :]
        return encode.to(self._device, dtype), decode.to(self._device, dtype)


def _check_gpu(capability: tuple[int, int], hip: str | None) -> None:
    """Raise ValueError unless a GPU has the instructions of hiqcache.transfers.kernel_codec."""
    if hip or capability < CAPABILITY:
        found = "ROCm" if hip else f"compute capability {capability[0]}.{capability[1]}"
        raise ValueError(
            f"transfer fused needs an NVIDIA GPU of compute capability "
            f"{'.'.join(map(str, CAPABILITY))} or more, and this is {found}: use "
            f"HIQCACHE_TRANSFER=torch."
        )


def _compile(kernel: Any, launch: Launch, arguments: tuple[Any, ...]) -> Any:
    """What ``[grid](*arguments)`` launches: compiled, or as it is under the interpreter.

    ``arguments`` are those of a transfer without tokens. Only the indices' addresses and the counts
    change from call to call, and the kernels are not specialised for those.

    Raises triton's OutOfResources where the GPU has not the shared memory that it takes.
    """
    if kernels.INTERPRETED:
        return kernel
    # A kernel's stages are its inner loop's own.
    compiled = kernel.warmup(*arguments, grid=(1,), num_warps=launch.warps, num_stages=1)
    # The first launch loads the kernel, for which the driver may wait for the device.
    compiled[(1, 1, 1)](*arguments)
    return compiled


def _bf16_bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.bfloat16).view(torch.int16).item())
