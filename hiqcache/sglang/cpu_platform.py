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
        """Have latent attention computed on the latent rows, which torch_native can.

        SGLang has no rule for torch_native there, and would take Triton's.
        """
        handlers = sys.modules.get("sglang.srt.models.deepseek_common.attention_backend_handler")
        if handlers is not None:
            handlers.AttentionBackendRegistry.register(
                self.get_default_attention_backend(), handlers._dispatch_mla_subtype
            )

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False
