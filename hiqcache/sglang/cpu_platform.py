"""An SGLang platform for machines without a GPU and without sgl_kernel: torch does everything."""

from __future__ import annotations

import sys
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class HiQCacheCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Runs stock SGLang's scheduler, radix cache and HiCache on a CPU.

    Declared out of tree: SGLang then takes its torch-native paths, where its own CPU platform would
    import sgl_kernel. It captures no graphs and pins no memory.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def post_load_model(self, model: Any) -> None:
        """Fill in what SGLang has no rule for on this platform, of what torch_native can do.

        Latent attention is computed on the latent rows; SGLang would take Triton's. DP attention
        pads a group's batch, whose padding tokens are given a length as Triton's backend gives it,
        and copies rows by indexing, which SGLang does on its own CPU platform.
        """
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda _: 1
        parallel = sys.modules.get("sglang.srt.layers.dp_attention")
        if parallel is not None:
            parallel.memcpy_func = parallel.memcpy_cpu  # type: ignore[attr-defined]
        handlers = sys.modules.get("sglang.srt.models.deepseek_common.attention_backend_handler")
        if handlers is not None:
            handlers.AttentionBackendRegistry.register(
                self.get_default_attention_backend(), handlers._dispatch_mla_subtype
            )

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False
