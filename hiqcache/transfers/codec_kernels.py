"""What row and page kernels share: a pool's checks, compiling, and launching."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from hiqcache.codecs.base import Codec
from hiqcache.record import VECTOR_BYTES, Planes
from hiqcache.transfers import kernels
from hiqcache.transfers.launch import Launch

Direction = Literal["backup", "restore"]

#: Parts of a record: what the kernels choose between.
PARTS = 2

#: The oldest compute capability that has the kernels' instructions, and that for rows of fp8 e4m3.
CAPABILITY = (8, 0)
E4M3_CAPABILITY = (8, 9)


class CodecKernels(ABC):
    """Encodes device rows into records, or decodes them, in memory that a GPU reads and writes.

    ``device`` is as in Transfer; ``planes`` say where records lie in the memory that each call
    names. Serves two parts of any number of heads, widths that are multiples of 16, and device
    buffers whose parts have one slot stride each. One of the two kernels, compiled here, so that no
    transfer waits for a compiler.

    ``inner``: whether a backup writes all layers of a tile before the next tile, where a kernel
    has that choice.

    Raises ValueError where the pool or the codec can't be served; ``transfer`` is its name there.
    """

    #: The codecs whose arithmetic the kernels have.
    codecs: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        kernel: Direction,
        codec: Codec,
        device: Sequence[Sequence[torch.Tensor]],
        planes: tuple[Planes, ...],
        page_size: int,
        memory: torch.Tensor,
        launch: Launch,
        inner: bool = False,
        transfer: str = "fused",
    ) -> None:
        self._codec, self._buffers, self._transfer = codec, device, transfer
        first = device[0][0]
        self._device, self._dtype = first.device, first.dtype
        self._check()
        self._parts = [tuple(buffers[0].shape[1:]) for buffers in device]
        self._planes, self._page_size, self._inner = planes, page_size, inner
        #: Rows of a token.
        self._token_rows = sum(heads for heads, _ in self._parts)
        self._strides = tuple(buffers[0].stride(0) * first.element_size() for buffers in device)
        bases = self._buffer_bases()
        self._bases = bases.to(self._device)
        self._fixed = (first, self._bases, *self._matrices(kernel))
        (codes_0, scales_0), (codes_1, scales_1) = planes
        self._where = (codes_0.base, codes_1.base, scales_0.base, scales_1.base)
        self._layer_strides = codes_0.layer_stride, scales_0.layer_stride
        if self._layer_strides != (codes_1.layer_stride, scales_1.layer_stride):
            raise ValueError(
                f"transfer {transfer} needs records whose parts have the same distance between "
                "layers; padded records of unequal parts have not: use HIQCACHE_TRANSFER=torch."
            )
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        self.launch, self._constants, self._kernel = self._compiled(
            self._function(kernel),
            launch,
            self._geometry(bases) | self._own(kernel),
            self.arguments(memory, none, none, 0, 1),
        )

    @abstractmethod
    def tiles(self, tokens: int) -> int:
        """Tiles of a layer of so many tokens."""

    @abstractmethod
    def _function(self, kernel: Direction) -> Any:
        """The Triton function."""

    @abstractmethod
    def _matrices(self, kernel: Direction) -> tuple[torch.Tensor, ...]:
        """Tensors that every launch takes after the buffers' bases."""

    @abstractmethod
    def _own(self, kernel: Direction) -> dict[str, Any]:
        """Constants of one direction."""

    @abstractmethod
    def _of_launch(self, launch: Launch) -> dict[str, Any]:
        """Constants that follow from the launch."""

    def __call__(
        self,
        grid: tuple[int, int, int],
        memory: torch.Tensor,
        host: torch.Tensor,
        device: torch.Tensor,
        layer: int,
        layers: int,
        shift: int = 0,
    ) -> None:
        """Serve ``layers`` layers from ``layer`` on: rows ``device``, record slots ``host``.

        ``host`` may hold more slots than are needed.

        ``grid``: programs along tiles, along layers. ``shift`` bytes are added to where records
        lie. Enqueued on the current stream.
        """
        arguments = self.arguments(memory, host, device, layer, layers, shift)
        self._kernel[grid](*arguments, *self._constants)

    def grid(self, tokens: int, layers: int) -> tuple[int, int, int]:
        """As many programs as the launch has, shared out over tiles, then over layers."""
        programs, tiles = self.launch.programs, self.tiles(tokens)
        # All layers at once, if the programs can be shared out evenly, and as many as it takes to
        # keep them all busy.
        at_once = max(math.gcd(layers, programs), min(layers, programs // tiles))
        return min(programs // at_once, tiles), at_once, 1

    def stream(self) -> int | None:
        """The current stream's handle, without the object that torch would make of it."""
        if self._device.type != "cuda":
            return None
        handle: int = driver.active.get_current_stream(self._device.index)
        return handle

    def arguments(
        self,
        memory: torch.Tensor,
        host: torch.Tensor,
        device: torch.Tensor,
        layer: int,
        layers: int,
        shift: int = 0,
    ) -> tuple[Any, ...]:
        """What the kernel takes before its constants, in its parameters' order."""
        where = self._where
        if shift:
            where = tuple(base + shift for base in where)  # type: ignore[assignment]
        return (
            *(memory, *self._fixed, *where, *self._layer_strides, *self._strides),
            *(host, device, device.numel(), layer, layers),
        )

    def _check(self) -> None:
        name = self._transfer
        if self._dtype not in self._codec.dtypes:
            served = ", ".join(map(str, self._codec.dtypes))
            raise ValueError(
                f"transfer {name} serves codec {self._codec.name} on rows of {served}, not "
                f"{self._dtype}."
            )
        if len(self._buffers) != PARTS:
            raise ValueError(
                f"transfer {name} serves records of {PARTS} parts, not {len(self._buffers)}: use "
                "HIQCACHE_TRANSFER=torch."
            )
        for buffers in self._buffers:
            shape = tuple(buffers[0].shape[1:])
            if shape[1] % VECTOR_BYTES:
                raise ValueError(
                    f"transfer {name} serves a head_dim that is a multiple of {VECTOR_BYTES}; this "
                    f"model's is {shape[1]}: use HIQCACHE_TRANSFER=torch."
                )
            strides = (buffers[0].stride(0), shape[1], 1)
            for rows in buffers:
                # Of one head, torch keeps whatever stride the axis had.
                found = (
                    rows.stride() if shape[0] > 1 else (rows.stride(0), shape[1], rows.stride(2))
                )
                if rows.shape[1:] != shape or found != strides:
                    raise ValueError(
                        f"transfer {name} needs device buffers whose rows are all contiguous, "
                        f"{shape} wide and {strides[0]} elements apart; found rows "
                        f"{tuple(rows.shape[1:])} with strides {rows.stride()}: use "
                        f"HIQCACHE_TRANSFER=torch."
                    )
        if kernels.INTERPRETED:
            return
        if self._device.type != "cuda":
            raise ValueError(
                f"transfer {name} runs on CUDA devices and this pool is on {self._device}: use "
                f"HIQCACHE_TRANSFER=torch."
            )
        needed = E4M3_CAPABILITY if self._dtype == torch.float8_e4m3fn else CAPABILITY
        found = torch.cuda.get_device_capability(self._device)
        check_gpu(name, found, torch.version.hip, needed)

    def _buffer_bases(self) -> torch.Tensor:
        """The kernels' bases, int64 ``[layers, 2]``."""
        first = self._buffers[0][0].data_ptr()
        return torch.tensor(
            [
                [rows.data_ptr() - first for rows in layer]
                for layer in zip(*self._buffers, strict=True)
            ],
            dtype=torch.int64,
        )

    def _geometry(self, bases: torch.Tensor) -> dict[str, Any]:
        """What a kernel is compiled for; nothing in it depends on the number of pages."""
        align = VECTOR_BYTES
        values: dict[str, Any] = {"PAGE_SIZE": self._page_size}
        for index, ((heads, width), (codes, scales)) in enumerate(
            zip(self._parts, self._planes, strict=True)
        ):
            values |= {
                f"HEADS_{index}": heads,
                f"DIM_{index}": width,
                f"CODE_PAGE_STRIDE_{index}": codes.page_stride,
                f"CODE_SLOT_STRIDE_{index}": codes.slot_stride,
                f"SCALE_PAGE_STRIDE_{index}": scales.page_stride,
                f"SCALE_SLOT_STRIDE_{index}": scales.slot_stride,
            }
            align = math.gcd(align, *codes[:4])
        return values | {
            "DEVICE_ALIGN": math.gcd(VECTOR_BYTES, *self._strides, *bases.flatten().tolist()),
            "SAME_STRIDE": self._strides[0] == self._strides[1],
            "CODE_ALIGN": align,
        }

    def _compiled(
        self, kernel: Any, launch: Launch, values: dict[str, Any], arguments: tuple[Any, ...]
    ) -> tuple[Launch, tuple[Any, ...], Any]:
        """The launch, the constants in the order of the kernel's parameters, what launches it.

        Where shared memory is too small for all stages, the launch has fewer of them.
        """
        while True:
            given = values | self._of_launch(launch)
            constants = tuple(given[name] for name in kernel.arg_names if name in given)
            try:
                return launch, constants, _compile(kernel, launch, (*arguments, *constants))
            except OutOfResources as error:
                if launch.stages == 1:
                    raise ValueError(
                        f"transfer {self._transfer} can't serve this model on this GPU, whose "
                        f"multiprocessors are too small for a token of its rows ({error}): use "
                        f"HIQCACHE_TRANSFER=torch."
                    ) from error
                launch = launch._replace(stages=launch.stages - 1)


def check_gpu(
    transfer: str,
    capability: tuple[int, int],
    hip: str | None,
    needed: tuple[int, int] = CAPABILITY,
) -> None:
    """Raise ValueError unless a GPU has the instructions of hiqcache.transfers.kernel_codec."""
    if hip or capability < needed:
        found = "ROCm" if hip else f"compute capability {capability[0]}.{capability[1]}"
        raise ValueError(
            f"transfer {transfer} needs an NVIDIA GPU of compute capability "
            f"{'.'.join(map(str, needed))} or more, and this is {found}: use "
            f"HIQCACHE_TRANSFER=torch."
        )


def check_memory(transfer: str, buffer: torch.Tensor) -> None:
    """Raise ValueError unless a GPU can reach ``buffer``, in vectors."""
    if buffer.data_ptr() % VECTOR_BYTES:
        raise ValueError(
            f"transfer {transfer} moves {VECTOR_BYTES} bytes of the arena at a time, and this "
            f"arena's buffer begins at no multiple of {VECTOR_BYTES}: allocate it at one."
        )
    if not kernels.INTERPRETED and not buffer.is_pinned():
        raise ValueError(
            f"transfer {transfer} lets the GPU read and write the arena, so its memory must be "
            "pinned (cudaHostRegister or pin_memory=True), and this arena's is not."
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


def bf16_bits(value: float) -> int:
    """The bits of ``value`` as bf16."""
    return int(torch.tensor(value, dtype=torch.bfloat16).view(torch.int16).item())
